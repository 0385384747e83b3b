"""A private store with every file of a running agent, and two generations."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from edge_client.errors import StoreError
from edge_client.store.checked_files import LEDGER_FILE, SENT_FILE, append_line
from edge_client.store.owner_record import Consent, Pause, PauseFile, TrafficCounter
from edge_client.store.private_store import FINALISED_FILE, NUMBERS_FILE, PRIVACY_FILE, DeliveryRecord, PrivateStore
from edge_client.store.roster import Roster
from edge_client.training.box_limits import MemoryShare
from export.model.manifest import note_signer
from fedcg.event_log import EventLog
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.edge.world import toy_generation, toy_snapshot, toy_spec

SPEC = toy_spec()
ENROLLED = SigningKey.generate().public
PINNED = PinnedKey(SigningKey.generate().public, 2)
MARK = b"m" * 32
COHORT = b"cohort secret of thirty-two byte"


def fill(store: PrivateStore) -> None:
    """Add the files of two rounds."""
    store.device_secret()
    store.sum_key()
    store.keep_cohort_secret(COHORT)
    store.save_spec(SPEC.canonical())
    store.artifacts.put(b"an aggregate")
    store.save_seen((3, 7, 1))
    store.save_pinned_key(ENROLLED, PINNED)
    for number in (1, 2):
        store.generations.commit(toy_generation(SPEC, RoundAttempt(number, 1), seed=number))
    store.save_delivery(DeliveryRecord("f" * 64, 1, 1, "accepted", ""))
    store.accept_snapshot(SPEC.digest, 3, toy_snapshot)
    store.save_left_out({"dot/1.png": "not an image"})
    store.save_record(FINALISED_FILE, {"aggregate": "f" * 64})
    store.save_sum_record("weights", {"round": 1})
    store.save_sum_record("parts", {"round": 1})
    store.save_record(NUMBERS_FILE, {"round": 1})
    store.save_roster(Roster({"a": ENROLLED}))
    Consent(store.root).approve(SPEC.digest, 1e9)
    PauseFile(store.root).write(Pause(since=1e9, until=1e9))
    TrafficCounter(store.root, time.time).sent(100)
    store.save_revoked("0" * 64, revoked=True)
    MemoryShare(store.root, 1.0, "cpu 4").round_begins()
    note_signer(store.root, ENROLLED.hex)
    for name in (SENT_FILE, LEDGER_FILE):
        for number in (1, 2):
            append_line(store.root / name, {"t": 1e9 + number, "kind": "receipt"})
    store.save_record(PRIVACY_FILE, {"spent": "x", "epsilon": 1.0})
    store.checkpoint.save(MARK, {"classify/x": np.arange(4, dtype=np.float32)})
    EventLog(store.root / "events.jsonl", time.time).write("agent_started", pid=1)
    with store.locked():
        pass


def contents(store: PrivateStore) -> dict[str, Any]:
    """Return everything that an agent and its training process read from a store at their start, by name; errors for refused files."""
    looks = {
        "generation": lambda: _described(store),
        "device secret": store.device_secret,
        "key for sums": lambda: store.sum_key().public,
        "cohort secret": store.cohort_secret,
        "spec": lambda: store.spec(SPEC.digest),
        "specs": store.spec_digests,
        "artifacts": lambda: sorted(store.artifacts.ids()),
        "seen": store.seen,
        "pinned": lambda: store.pinned_key(ENROLLED),
        "deliveries": store.deliveries,
        "finalised": lambda: store.record(FINALISED_FILE),
        "privacy": lambda: store.record(PRIVACY_FILE),
        "checkpoint": lambda: {name: one.tolist() for name, one in store.checkpoint.load(MARK)[0].items()},
    }
    return {name: _result_of(look) for name, look in looks.items()}


def _result_of(look: Callable[[], Any]) -> Any:
    try:
        return look()
    except StoreError as error:
        return error


def _described(store: PrivateStore) -> tuple[object, ...]:
    _, problems = store.generations.current()
    state = store.generations.load()
    if state is None:
        return None, problems
    store.generations.snapshot(state.generation)
    update = store.generations.update_bytes(state.generation)
    assert store.generations.newest() == state.generation
    weights = {
        part.value: {name: one.tolist() for name, one in some.items()} for part, some in state.slots["personal"].items()
    }
    return state.generation.round_attempt, problems, weights, update


def files_of(root: Path) -> dict[str, bytes]:
    """Return every file below a folder, by path."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}
