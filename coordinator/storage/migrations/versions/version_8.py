"""Version 8: the masked sum of the open round attempt of each federation."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "8"
down_revision = "7"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the table."""
    count = sa.Integer().with_variant(sa.BigInteger, "postgresql")
    op.create_table(
        "masked_sums",
        sa.Column("federation", sa.String, sa.ForeignKey("federations.id"), primary_key=True),
        sa.Column("round", count, nullable=False),
        sa.Column("attempt", count, nullable=False),
        sa.Column("content", sa.String, nullable=False),
    )
