"""How a database of an earlier version becomes one of this version: SQL as it was when the version was made, never changed later."""

from __future__ import annotations

from sqlalchemy import Connection

_STEPS: dict[int, tuple[str, ...]] = {
    # devices have a state; certificates and enrolment tokens
    1: (
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
    ),
    # replacements of the coordinator's message key
    2: (
        """CREATE TABLE key_links (
            federation VARCHAR NOT NULL, serial INTEGER NOT NULL, epoch INTEGER NOT NULL, old VARCHAR NOT NULL,
            new VARCHAR NOT NULL, signature VARCHAR NOT NULL, made_at FLOAT NOT NULL,
            PRIMARY KEY (federation, serial), FOREIGN KEY(federation) REFERENCES federations (id))""",
    ),
    # how far updates are from their base, and what they count for
    3: ("ALTER TABLE updates ADD COLUMN distances VARCHAR", "ALTER TABLE updates ADD COLUMN weight INTEGER"),
    4: (
        "ALTER TABLE federations ADD COLUMN status VARCHAR DEFAULT 'running' NOT NULL",
        "ALTER TABLE federations ADD COLUMN status_reason VARCHAR DEFAULT '' NOT NULL",
        "ALTER TABLE federations ADD COLUMN policy VARCHAR DEFAULT '{}' NOT NULL",
        "ALTER TABLE federations ADD COLUMN continued_from VARCHAR",
        "ALTER TABLE devices ADD COLUMN disabled_at FLOAT",
        "ALTER TABLE devices ADD COLUMN disabled_because VARCHAR DEFAULT '' NOT NULL",
        "ALTER TABLE updates ADD COLUMN figures VARCHAR",
        "ALTER TABLE tokens ADD COLUMN federation VARCHAR",
    ),
}
SCHEMA_VERSION = max(_STEPS) + 1


def migrate(connection: Connection, version: int) -> None:
    """Bring a database from an earlier version to this one; the caller's transaction makes it all or nothing."""
    for step in range(version, SCHEMA_VERSION):
        for statement in _STEPS[step]:
            connection.exec_driver_sql(statement)
