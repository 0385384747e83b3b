"""Version 1: the tables of the first release."""

from __future__ import annotations

from alembic import op

revision = "1"
down_revision = None
branch_labels = None
depends_on = None

STATEMENTS = (
    """CREATE TABLE leases (
            id INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY (id))""",
    """CREATE TABLE devices (
            id VARCHAR NOT NULL, public_key VARCHAR NOT NULL, enrolled_at FLOAT NOT NULL, last_seen_at FLOAT,
            agent VARCHAR, PRIMARY KEY (id))""",
    """CREATE TABLE federations (
            id VARCHAR NOT NULL, method VARCHAR NOT NULL, spec VARCHAR NOT NULL, rounds INTEGER NOT NULL,
            min_clients INTEGER NOT NULL, max_attempts INTEGER NOT NULL, deadline_s FLOAT NOT NULL,
            first_attempt INTEGER NOT NULL, created_at FLOAT NOT NULL, PRIMARY KEY (id))""",
    """CREATE TABLE attempts (
            federation VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, state VARCHAR NOT NULL,
            base VARCHAR NOT NULL, opened_at FLOAT NOT NULL, deadline_at FLOAT NOT NULL, distilling_at FLOAT,
            aggregate_stored_at FLOAT, closed_at FLOAT, reason VARCHAR NOT NULL,
            PRIMARY KEY (federation, round, attempt), FOREIGN KEY(federation) REFERENCES federations (id))""",
    """CREATE TABLE participants (
            federation VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, client VARCHAR NOT NULL,
            state VARCHAR NOT NULL, reason VARCHAR NOT NULL, PRIMARY KEY (federation, round, attempt, client),
            FOREIGN KEY(federation) REFERENCES federations (id), FOREIGN KEY(client) REFERENCES devices (id))""",
    """CREATE TABLE updates (
            federation VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, client VARCHAR NOT NULL,
            artifact VARCHAR NOT NULL, size INTEGER NOT NULL, outcome VARCHAR NOT NULL, reason VARCHAR NOT NULL,
            report VARCHAR, manifest_at FLOAT NOT NULL, stored_at FLOAT NOT NULL,
            PRIMARY KEY (federation, round, attempt, client), FOREIGN KEY(federation) REFERENCES federations (id),
            FOREIGN KEY(client) REFERENCES devices (id))""",
    """CREATE TABLE aggregates (
            federation VARCHAR NOT NULL, round INTEGER NOT NULL, attempt INTEGER NOT NULL, artifact VARCHAR NOT NULL,
            size INTEGER NOT NULL, server_state VARCHAR NOT NULL, stored_at FLOAT NOT NULL,
            PRIMARY KEY (federation, round), FOREIGN KEY(federation) REFERENCES federations (id))""",
)


def upgrade() -> None:
    """Run the statements as they were when this version was made."""
    for statement in STATEMENTS:
        op.execute(statement)
