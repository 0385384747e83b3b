"""Version 1: the tables of `schema`, which may change until the first release; then this file gets them as they are, and a change another version."""

from alembic import op

from coordinator.storage.schema import metadata

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make all tables."""
    metadata.create_all(op.get_bind(), checkfirst=False)
