"""Version 1: the tables of `schema`. At the first release, this file gets a fixed copy, and later changes get new versions."""

from alembic import op

from coordinator.storage.schema import metadata

revision = "1"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    metadata.create_all(op.get_bind(), checkfirst=False)
