"""Brings a database of an earlier version, or an empty one, to this version: one Alembic revision per version, in `versions`."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

SCHEMA_VERSION = 9


def upgrade(connection: Connection, version: int, target: str = str(SCHEMA_VERSION)) -> None:
    """Run the revisions after `version`; the caller's transaction makes it all or nothing.

    Args:
        connection: of the database, in a transaction.
        version: the version that the database has; 0 when it is empty.
        target: the version to bring it to.
    """
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.attributes["connection"] = connection
    if version:
        command.stamp(config, str(version))  # databases up to version 4 have no table of Alembic's
    command.upgrade(config, target)
