"""One Alembic revision per database version, named by its number; statements of a released version never change."""
