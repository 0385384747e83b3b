"""Version 2: devices have a state; certificates and enrolment tokens."""

from __future__ import annotations

from alembic import op

revision = "2"
down_revision = "1"
branch_labels = None
depends_on = None

STATEMENTS = (
    "ALTER TABLE devices ADD COLUMN state VARCHAR DEFAULT 'enrolled' NOT NULL",
    "ALTER TABLE devices ADD COLUMN ended_at FLOAT",
    "ALTER TABLE devices ADD COLUMN ended_because VARCHAR DEFAULT '' NOT NULL",
    """CREATE TABLE certificates (
            serial VARCHAR NOT NULL, device VARCHAR NOT NULL, issued_at FLOAT NOT NULL, expires_at FLOAT NOT NULL,
            revoked_at FLOAT, pem VARCHAR NOT NULL,
            PRIMARY KEY (serial), FOREIGN KEY(device) REFERENCES devices (id))""",
    """CREATE TABLE tokens (
            id VARCHAR NOT NULL, secret_hash VARCHAR NOT NULL, device VARCHAR, replaces BOOLEAN NOT NULL,
            created_at FLOAT NOT NULL, expires_at FLOAT NOT NULL, revoked_at FLOAT, used_at FLOAT, used_by VARCHAR,
            used_for VARCHAR, serial VARCHAR,
            PRIMARY KEY (id))""",
)


def upgrade() -> None:
    """Run the statements as they were when this version was made."""
    for statement in STATEMENTS:
        op.execute(statement)
