"""What an operator sees of a private store, read without disturbing the agent that works in it."""

from __future__ import annotations

import fcntl
from pathlib import Path

from edge_client.config import AgentConfig
from edge_client.errors import StoreDamagedError, StoreFormatError
from edge_client.private_store import PrivateStore
from fedcg.event_log import EventValue, read_events
from fedcg.wire.enrolment import load_certificate
from fedcg.wire.errors import MalformedError

Status = dict[str, EventValue]


def read_status(config: AgentConfig) -> Status:
    """The state of a device's store.

    Raises:
        StoreFormatError: there is no private store at the configured place.
    """
    if not (config.store / "format.json").exists():
        raise StoreFormatError(f"{config.store} holds no private store yet; `fedcg agent run` makes one")
    store = PrivateStore.open(config.store, config.federation, config.device)
    status: Status = {
        "device": config.device,
        "federation": config.federation,
        "running": _is_locked(config.store / "lock"),
        "training_process": _is_locked(config.store / "trainer.lock"),
        "private_parts_start": "cohort secret" if store.cohort_secret() is not None else "public spec seed",
        "certificate_until": _certificate_end(config),
        **_state(store),
        **_latest(config.store / "events.jsonl"),
    }
    status["model"] = str(store.finalised().get("model_dir") or "")
    return status


def _certificate_end(config: AgentConfig) -> str | None:
    if config.tls is None:
        return None
    try:
        certificate = load_certificate(config.tls.cert.read_bytes())
    except (OSError, MalformedError):
        return None
    return f"{certificate.not_valid_after_utc:%Y-%m-%d %H:%M} UTC"


def _state(store: PrivateStore) -> Status:
    try:
        generation, problems = store.generations.current()
    except StoreDamagedError as error:
        return {"problem": str(error)}
    outbox = store.outbox(generation)
    deliveries = store.deliveries()
    last = deliveries[-1] if deliveries else None
    return {
        "round": None if generation is None else generation.cursor.round,
        "attempt": None if generation is None else generation.cursor.attempt,
        "spec": None if generation is None else generation.spec,
        "best_round": None if generation is None else generation.scores.get("best.round"),
        "update_waiting": None if outbox is None else outbox.artifact,
        "last_receipt": None
        if last is None
        else f"round {last.round}.{last.attempt}: {last.outcome} {last.reason}".strip(),
        "problem": "; ".join(problems) or None,
    }


def _latest(path: Path) -> Status:
    wanted = {
        "link": "up",
        "welcomed": "epoch",
        "declined": "reason",
        "refused": "detail",
        "agent_error": "detail",
        "cohort": "others",
    }
    found: Status = {}
    refused: dict[str, int] = {}
    for event in read_events(path):
        name = str(event.get("event"))
        if name == "agent_started":
            refused = {}
        elif name == "refused" and isinstance(count := event.get("count"), int):
            refused[str(event.get("reason"))] = count
        if name in wanted:
            found[f"last_{name}"] = event.get(wanted[name])
    return {"refused": refused, **found}


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False
