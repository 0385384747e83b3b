"""Upgrades an older or empty database to this version: one Alembic revision per version, in `versions`."""

from pathlib import Path

from sqlalchemy import Connection

SCHEMA_VERSION = 1
SCRIPTS = Path(__file__).parent


def upgrade(connection: Connection, target: int) -> None:
    """Run the missing revisions up to `target`; the caller's transaction makes this atomic."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, str(target))
