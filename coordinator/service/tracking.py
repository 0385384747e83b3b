"""Sends every federation's spec, and the figures of its closed rounds, to the configured tracker."""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.rounds.records import FederationRecord, UpdateRecord
from coordinator.storage.store import Store
from fedcg.learning.spec import FederationSpec
from fedcg.tracking import TrackedRun, Tracking, check_track
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.messages.schemas import Outcome, RoundAttempt

_REPORTED = ("examples", "accuracy", "loss", "shadow", "downloaded")


class TrackedFederations:
    """Sends the figures of every closed round: clients' reports, the distillation's loss, bytes, updates.

    Args:
        track: see `fedcg.tracking`; a relative directory is relative to `folder`.
        store: the database.
        artifacts: the store with the specs.

    Raises:
        BadInputError: the tracker's package is not installed.
    """

    def __init__(self, track: str, folder: Path, store: Store, artifacts: ArtifactStore) -> None:
        check_track(track)
        self._track, self._folder, self._store, self._artifacts = track, folder, store, artifacts
        self._runs: dict[str, Tracking] = {}
        self._finished: list[Tracking] = []
        self._losses: dict[str, float] = {}  # last loss of each federation's distillation

    def follow(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the event log."""
        federation, name = event.get("federation"), event.get("event")
        if not isinstance(federation, str):
            return
        if name == "aggregate_step" and event.get("loss") is not None:
            self._losses[federation] = event["loss"]
        if name == "aggregate_stored":
            figures = figures_of(self._updates(event), event["size"])
            if federation in self._losses:
                figures["distillation/loss"] = self._losses.pop(federation)
            self._run(federation, event["round"]).add(event["round"], figures)
        if name == "finished" and federation in self._runs:
            rows = [
                {"client": one.client, "bytes": one.size, **{name: one.reported.get(name) for name in _REPORTED}}
                for one in _accepted(self._updates(event))
            ]
            self._finished.append(self._runs.pop(federation))
            self._finished[-1].finish({"clients": rows, "files": [{"file": "aggregate", "sha256": event["aggregate"]}]})

    def close(self) -> None:
        """End all runs at the tracker; the next coordinator resumes those of unfinished federations."""
        for run in (*self._runs.values(), *self._finished):
            run.close()

    def _updates(self, event: Mapping[str, Any]) -> list[UpdateRecord]:
        return self._store.updates(event["federation"], RoundAttempt(event["round"], event["attempt"]))

    def _run(self, federation: str, round_number: int) -> Tracking:
        if federation not in self._runs:
            record = self._store.federation(federation)
            identity = hashlib.sha256(f"{record.spec} {record.created_at}".encode()).hexdigest()[:32]
            run = TrackedRun(federation, identity, partial(self._settings, record), is_continued=round_number > 1)
            self._runs[federation] = Tracking(self._track, run, self._folder)
        return self._runs[federation]

    def _settings(self, record: FederationRecord) -> Mapping[str, object]:
        spec = FederationSpec.parse(self._artifacts.get(record.spec)).model_dump(mode="json", exclude={"layouts"})
        return {**spec, "policy": record.policy.model_dump(mode="json")}


def _accepted(updates: list[UpdateRecord]) -> list[UpdateRecord]:
    return [update for update in updates if update.outcome is Outcome.ACCEPTED]


def figures_of(updates: list[UpdateRecord], aggregate_bytes: int) -> dict[str, float]:
    """The figures of a round, by tag.

    Args:
        updates: the clients' update records; only accepted ones count.
        aggregate_bytes: size of the aggregate.
    """
    accepted = _accepted(updates)
    figures = {
        "updates/accepted": float(len(accepted)),
        "updates/rejected": float(sum(update.outcome is Outcome.REJECTED for update in updates)),
        "bytes/up": float(sum(update.size for update in accepted)),
        "bytes/aggregate": float(aggregate_bytes),
    }
    for name in _REPORTED:
        known = {update.client: update.reported[name] for update in accepted if name in update.reported}
        figures |= {f"{name}/{client}": float(value) for client, value in sorted(known.items())}
        if known:
            figures[f"{name}/mean"] = statistics.fmean(known.values())
    return figures
