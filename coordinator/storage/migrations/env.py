"""Alembic runs this file for every upgrade, on the connection and in the transaction of `coordinator.storage.migrations.upgrade`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
