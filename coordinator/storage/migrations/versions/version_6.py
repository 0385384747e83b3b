"""Version 6: what devices report of themselves."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "6"
down_revision = "5"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    op.create_table(
        "conditions",
        sa.Column("federation", sa.String, sa.ForeignKey("federations.id"), primary_key=True),
        sa.Column("device", sa.String, sa.ForeignKey("devices.id"), primary_key=True),
        sa.Column("at", sa.Float, nullable=False),
        sa.Column("content", sa.String, nullable=False),
    )
