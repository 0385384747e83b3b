"""Version 4: how far updates are from their base, and the number of examples they count for."""

from __future__ import annotations

from alembic import op

revision = "4"
down_revision = "3"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE updates ADD COLUMN distances VARCHAR",
    "ALTER TABLE updates ADD COLUMN weight INTEGER",
)


def upgrade() -> None:
    """Run the statements as they were when this version was made."""
    for statement in STATEMENTS:
        op.execute(statement)
