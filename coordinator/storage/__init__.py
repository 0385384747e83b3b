"""Database, migrations, retention."""
