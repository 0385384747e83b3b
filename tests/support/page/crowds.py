"""Databases with many devices and rounds, written directly: for views, not for the protocol."""

import json
from dataclasses import asdict, replace

from sqlalchemy import insert

from coordinator.storage import schema
from coordinator.storage.store import Store
from tests.support.wire.golden_files import CONDITION


def add_crowd(store: Store, federation: str, devices: int, rounds: int, now: float) -> None:
    """Devices with certificates, presence, and an update each to every closed round; round `rounds` + 1 is open for all of them.

    Every eighth device reports that it is worse off than alone, every tenth declined the open round.
    """
    first = store.aggregates(federation)[0]
    names = [f"line-{number:04d}" for number in range(devices)]
    rows: dict[str, list[dict[str, object]]] = {
        "devices": [
            {
                "id": name,
                "public_key": "0" * 64,
                "enrolled_at": now - 9e5,
                "last_seen_at": now - index,
                "agent": "0.1.0",
            }
            for index, name in enumerate(names)
        ],
        "certificates": [
            {"serial": f"{index:x}", "device": name, "issued_at": now - 9e5, "expires_at": now + 9e5, "pem": "x" * 800}
            for index, name in enumerate(names)
        ],
        "presence": [
            {"federation": federation, "device": name, "at": now - age, "online": age != 1800.0, "reason": ""}
            for name in names
            for age in (7200.0, 1800.0, 600.0)
        ],
        "conditions": [
            {"federation": federation, "device": name, "at": now - 60, "content": CONDITION.model_dump_json()}
            for name in names
        ],
        "attempts": [_attempt(federation, number, rounds, now, first.artifact) for number in range(1, rounds + 2)],
        "aggregates": [
            asdict(replace(first, round=number, attempt=1, stored_at=now - (rounds - number + 1) * 600))
            for number in range(1, rounds + 1)
        ],
        "participants": [
            _participant(federation, number, index, name, is_open=number > rounds)
            for number in range(1, rounds + 2)
            for index, name in enumerate(names)
        ],
        "updates": [
            _update(federation, number, index, name, now - (rounds - number + 1) * 600)
            for number in range(1, rounds + 1)
            for index, name in enumerate(names)
        ],
    }
    with store._engine.begin() as connection:
        for table, values in rows.items():
            connection.execute(insert(schema.metadata.tables[table]), values)


def _attempt(federation: str, number: int, rounds: int, now: float, base: str) -> dict[str, object]:
    opened = now - (rounds - number + 2) * 600
    is_open = number > rounds
    return {
        "federation": federation,
        "round": number,
        "attempt": 1,
        "state": "collecting" if is_open else "closed",
        "base": base,
        "opened_at": opened,
        "deadline_at": now + 900,
        "closed_at": None if is_open else opened + 480,
        "reason": "",
    }


def _participant(federation: str, number: int, index: int, name: str, *, is_open: bool) -> dict[str, object]:
    declined = is_open and index % 10 == 3
    return {
        "federation": federation,
        "round": number,
        "attempt": 1,
        "client": name,
        "state": "declined" if declined else "accepted",
        "reason": "no_data" if declined else "",
    }


def _update(federation: str, number: int, index: int, name: str, at: float) -> dict[str, object]:
    alone = 0.62 + 0.02 * number + 0.0001 * (index % 100)
    report = {
        "examples": 100 + index,
        "accuracy": alone + (-0.03 if index % 8 == 5 else 0.05),
        "shadow": alone,
        "health": "ok",
        "downloaded": alone - 0.1,
        "per_class": {"accuracy": [alone, None, 0.9], "shadow": [alone - 0.01, None, 0.8], "downloaded": None},
    }
    return {
        "federation": federation,
        "round": number,
        "attempt": 1,
        "client": name,
        "artifact": f"{index:032x}{number:032x}",
        "size": 120_000 + index,
        "outcome": "accepted",
        "reason": "",
        "report": json.dumps(report),
        "manifest_at": at,
        "stored_at": at + index * 0.001,
        "weight": 100 + index,
    }
