"""Version 5: federations with a status and a policy, disabled devices, presence, tokens and repeated requests of the API.

PostgreSQL comes with this version; integers have 64 bits there, as in SQLite and in messages.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "5"
down_revision = "4"
branch_labels = None
depends_on = None

COUNTS = {
    "leases": ("epoch",),
    "federations": ("rounds", "min_clients", "max_attempts", "first_attempt"),
    "key_links": ("serial", "epoch"),
    "attempts": ("round", "attempt"),
    "participants": ("round", "attempt"),
    "updates": ("round", "attempt", "size", "weight"),
    "aggregates": ("round", "attempt", "size"),
}


def upgrade() -> None:
    """Add the columns and tables."""
    op.add_column("federations", sa.Column("status", sa.String, nullable=False, server_default="running"))
    op.add_column("federations", sa.Column("status_reason", sa.String, nullable=False, server_default=""))
    op.add_column("federations", sa.Column("policy", sa.String, nullable=False, server_default="{}"))
    op.add_column("federations", sa.Column("continued_from", sa.String))
    op.add_column("devices", sa.Column("disabled_at", sa.Float))
    op.add_column("devices", sa.Column("disabled_because", sa.String, nullable=False, server_default=""))
    op.add_column("updates", sa.Column("figures", sa.String))
    op.add_column("tokens", sa.Column("federation", sa.String))
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("role", sa.String, nullable=False),
        sa.Column("secret_hash", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("expires_at", sa.Float),
        sa.Column("revoked_at", sa.Float),
        sa.Column("last_used_at", sa.Float),
    )
    op.create_table(
        "presence",
        sa.Column("federation", sa.String, sa.ForeignKey("federations.id"), primary_key=True),
        sa.Column("device", sa.String, sa.ForeignKey("devices.id"), primary_key=True),
        sa.Column("at", sa.Float, primary_key=True),
        sa.Column("online", sa.Boolean, nullable=False),
        sa.Column("reason", sa.String, nullable=False, server_default=""),
    )
    op.create_table(
        "idempotency",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("token", sa.String, primary_key=True),
        sa.Column("request_hash", sa.String, nullable=False),
        sa.Column("status", sa.Integer, nullable=False),
        sa.Column("body", sa.String, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    if op.get_bind().dialect.name == "postgresql":
        for table, columns in COUNTS.items():
            for column in columns:
                op.alter_column(table, column, type_=sa.BigInteger)
