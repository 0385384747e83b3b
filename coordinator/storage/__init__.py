"""Database, migrations, artifacts and their retention."""
