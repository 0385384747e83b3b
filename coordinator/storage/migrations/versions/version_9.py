"""Version 9: what each update's header says of its device beside the report: versions, processor, threads."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "9"
down_revision = "8"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("updates", sa.Column("facts", sa.String))
