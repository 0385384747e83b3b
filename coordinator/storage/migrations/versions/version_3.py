"""Version 3: replacements of the coordinator's message key."""

from __future__ import annotations

from alembic import op

revision = "3"
down_revision = "2"
branch_labels = None
depends_on = None

STATEMENTS = (
    """CREATE TABLE key_links (
            federation VARCHAR NOT NULL, serial INTEGER NOT NULL, epoch INTEGER NOT NULL, old VARCHAR NOT NULL,
            new VARCHAR NOT NULL, signature VARCHAR NOT NULL, made_at FLOAT NOT NULL,
            PRIMARY KEY (federation, serial), FOREIGN KEY(federation) REFERENCES federations (id))""",
)


def upgrade() -> None:
    """Run the statements as they were when this version was made."""
    for statement in STATEMENTS:
        op.execute(statement)
