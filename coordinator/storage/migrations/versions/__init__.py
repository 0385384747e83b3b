"""One Alembic revision per version of the database, named by its number; statements of a released version never change."""
