"""Version 7: the pace of each participant: its share of the local steps, and how long it expects to take."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "7"
down_revision = "6"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns."""
    op.add_column("participants", sa.Column("share", sa.Float, nullable=False, server_default="1"))
    op.add_column("participants", sa.Column("accepted_at", sa.Float))
    op.add_column("participants", sa.Column("predicted_s", sa.Float))
