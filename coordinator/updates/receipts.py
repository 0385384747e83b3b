"""The way of an update into the coordinator: manifest, grants, chunks, check, durable, receipt.

Order that matters: artifact on disk, then the database's commit, then the receipt. Says to the round engine what happened;
decides only what becomes of an update.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from coordinator.errors import ValidationError
from coordinator.messaging.publisher import Publisher
from coordinator.rounds.records import AttemptState, UpdateRecord
from coordinator.rounds.round_engine import Phase, RoundState, UpdateRefused, UpdateStored
from coordinator.storage.store import Store
from coordinator.updates.receiver import Broken, GivenUp, Intake, IntakeEvent
from coordinator.updates.robustness import Distances, Yardstick
from coordinator.updates.track_record import typical_distances
from coordinator.updates.upload_windows import Grant, Received, Uploads
from coordinator.updates.validation import Expected, base_in, max_update_bytes, validate_update
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.refusal_counter import Refusals
from fedcg.wire.artifacts.artifacts import ArtifactStore
from fedcg.wire.messages.messages import MAX_ARTIFACT_BYTES, Carrier, Manifest, Outcome
from fedcg.wire.transfer.broker_presets import LinkLimits
from fedcg.wire.transfer.partial_files import Partials

MAX_PARTIAL_FILES = 1024
CHECKS = 8  # updates that are checked, or wait for the disk, at a time
MAX_PARTIAL_BYTES = 64 * MAX_ARTIFACT_BYTES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checked:
    """The outcome of checking a received update, off the event loop.

    Attributes:
        reason: why it is rejected; empty when it may be merged.
        distances: of each part from the base.
    """

    received: Received
    report: str | None
    reason: str
    distances: Distances = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """How an update ends without being looked into."""

    outcome: Outcome
    reason: str


Ended = UpdateStored | UpdateRefused


class Context(Protocol):
    """What the service was given, as far as updates need it."""

    @property
    def spec(self) -> FederationSpec:
        """Of the federation."""

    @property
    def store(self) -> Store:
        """The database."""

    @property
    def artifacts(self) -> ArtifactStore:
        """Directory of artifacts."""

    @property
    def events(self) -> EventLog:
        """The event log."""

    @property
    def clock(self) -> Callable[[], float]:
        """Unix time."""

    @property
    def limits(self) -> LinkLimits:
        """How the link to the broker is used."""


class Uplink:
    """Takes updates of one federation.

    Args:
        context: what the service was given.
        publisher: sends grants and receipts.
        state: asks for the round engine's state.
        base: asks for the aggregate that the open round starts from; from any thread.
        notify: gets what the uplink's threads say, on those threads; grants are to be handed to `follow`, and what was checked to
            `ended`, on the event loop.
        refusals: counts and tells what the intake refuses.
    """

    def __init__(
        self,
        context: Context,
        publisher: Publisher,
        state: Callable[[], RoundState],
        base: Callable[[], str],
        notify: Callable[[Grant | Checked | Broken], None],
        refusals: Refusals,
    ) -> None:
        self._spec = context.spec
        self._store = context.store
        self._artifacts = context.artifacts
        self._events = context.events
        self._clock = context.clock
        self._publisher = publisher
        self._state = state
        self._open_base = base
        self._notify = notify
        self._max_bytes = max_update_bytes(context.spec)
        self._yardstick: Yardstick | None = None
        partials = Partials(context.artifacts.root / ".partial", MAX_PARTIAL_FILES, MAX_PARTIAL_BYTES)
        uploads = Uploads(partials, context.limits.window, context.limits.shared)
        self.intake = Intake(uploads, partials.collect, self._heard, refusals)
        self._refusals = refusals
        self._checks = ThreadPoolExecutor(CHECKS, "check")
        self._active: dict[str, Manifest] = {}

    def is_busy(self, device: str) -> bool:
        """Whether an update of a device is under way."""
        return device in self._active

    def invite(self, device: str, position: tuple[int, int]) -> None:
        """Ask a device to take part in (round, attempt), and grant the first chunks of its update where there is room."""
        grant = 0
        if self._publisher.carrier(device) is Carrier.MQTT and not self.is_busy(device):
            grant = self.intake.expect(device, len(self._state().participants))
        self._publisher.invite(device, position, grant)

    def follow(self, event: Grant) -> None:
        """Tell a device what it may send."""
        if self._is_current(event.device, event.manifest):
            self._publisher.need(event.device, event.manifest, event.ranges)

    def _is_current(self, device: str, manifest: Manifest) -> bool:
        """Whether an update did not end meanwhile."""
        known = self._active.get(device)
        return known is not None and known.artifact == manifest.artifact

    def _heard(self, event: IntakeEvent) -> None:
        """On the intake's thread: what is complete is checked without a detour over the event loop."""
        if isinstance(event, Received):
            self._checks.submit(self._check, event)
        elif isinstance(event, GivenUp):
            self._unforeseen(event.received, event.error)
        else:
            self._notify(event)

    def _check(self, received: Received) -> None:
        """On a thread of `_checks`."""
        try:
            self._notify(self.check(received, self._open_base()))
        except OSError as error:  # our disk's, not the update's: the service ends with it
            self._notify(Broken(error))
        except Exception as error:  # noqa: BLE001 - the outermost frame of a thread
            self._unforeseen(received, error)

    def _unforeseen(self, received: Received, error: Exception) -> None:
        """Reject the one update under which it happened: after a restart the same would happen again."""
        device, manifest = received.device, received.manifest
        log.error(
            "the update of %s to round %d, attempt %d, is rejected: its check failed",
            device,
            manifest.round,
            manifest.attempt,
            exc_info=error,
        )
        self._refusals.note("unforeseen", error, device)
        reason = f"its check failed with {type(error).__name__}; the coordinator's log has the details"
        self._notify(Checked(received, None, reason))

    def forget(self, device: str) -> None:
        """Drop what a device has sent so far: its update ended, or it is no member any more."""
        if self._active.pop(device, None) is not None:
            self.intake.end(device)

    async def manifest(self, device: str, manifest: Manifest) -> Ended | None:
        """Answer a manifest: the receipt it had before, a verdict, or a grant."""
        earlier = await asyncio.to_thread(self._store.update, self._key(manifest), device)
        if earlier is not None:
            if earlier.artifact == manifest.artifact.id:
                self._publisher.receipt(device, manifest, earlier.outcome, earlier.reason)
            else:
                self._conflict(device, manifest)
            return None
        verdict = await self._verdict(device, manifest)
        if verdict is not None:
            self._end_with(device, manifest, verdict)
            return None
        if manifest.artifact.size > self._max_bytes:
            reason = (
                f"it has {manifest.artifact.size} bytes; an update of this federation has at most {self._max_bytes}"
            )
            return await self._reject(Checked(Received(device, manifest, self._clock()), None, reason))
        self._active[device] = manifest
        self.intake.begin(device, manifest, self._clock(), self._publisher.carrier(device))
        return None

    def check(self, received: Received, base: str) -> Checked:
        """Validate a received update and, when it is good, make it durable. Blocking: call it on a thread."""
        manifest = received.manifest
        expected = Expected(self._spec.federation, manifest.round, manifest.attempt, received.device, base)
        try:
            data = received.file.read_bytes()
            yardstick = self._yardstick_for(base, manifest.round)
            artifact = validate_update(data, self._spec, expected, yardstick.base)
            distances = yardstick.distances(artifact.parts)
            yardstick.check(received.device, distances)
            self._artifacts.adopt(received.file, manifest.artifact.id)
        except ValidationError as error:
            return Checked(received, None, error.reason)
        except FileNotFoundError:  # deleted with its attempt, which ended meanwhile: the receipt will say so
            return Checked(received, None, "its attempt ended while it was checked")
        report = artifact.header.report
        told = None if report is None else report.model_dump_json(exclude_none=True)
        return Checked(received, told, "", distances)

    def _yardstick_for(self, artifact: str, round_number: int) -> Yardstick:
        """What updates are taken to and measured by, made once a round; two threads that come first both do it."""
        known = self._yardstick
        if known is None or known.base.id != artifact:
            base = base_in(self._artifacts.get(artifact), self._spec, artifact)
            typical = typical_distances(self._store, self._spec.federation, round_number - 1)
            known = self._yardstick = Yardstick(base, typical)
        return known

    async def ended(self, checked: Checked) -> Ended | None:
        """Commit how a checked update ended and send its receipt."""
        received = checked.received
        device, manifest = received.device, received.manifest
        if checked.reason and not self._is_current(device, manifest):
            return None  # forgotten or replaced while it was checked, perhaps with its file: that is no verdict on it
        verdict = await self._verdict(device, manifest)
        if verdict is not None:  # the attempt moved on while the update was checked
            self._end_with(device, manifest, verdict)
            return None
        if checked.reason:
            return await self._reject(checked)
        record = self._record(checked, Outcome.ACCEPTED)
        stored = await asyncio.to_thread(self._store.end_update, record)
        if stored is not record:  # the device announced twice before the first one was through
            if stored.artifact == record.artifact:
                told = "an update of this round and attempt is stored already"
                self._end_with(device, manifest, Verdict(Outcome.DUPLICATE, told))
            else:
                self._conflict(device, manifest)
            return None
        self.forget(device)
        arrival = received.arrival
        self._events.write(
            "update_stored",
            resumed=arrival.resumed,
            received=arrival.fresh,
            repeated=arrival.repeated,
            client=device,
            round=manifest.round,
            attempt=manifest.attempt,
            artifact=manifest.artifact.id,
            size=manifest.artifact.size,
            seconds=round(record.stored_at - record.manifest_at, 4),
        )
        self._publisher.receipt(device, manifest, Outcome.ACCEPTED, "")
        return UpdateStored(manifest.round, manifest.attempt, device)

    def stop(self) -> None:
        """Take nothing more; what came stays on disk."""
        self._checks.shutdown(wait=False, cancel_futures=True)
        self.intake.close()

    def close(self, outcome: Outcome, reason: str) -> None:
        """The attempt takes nothing any more: end whatever is under way."""
        abandoned, self._active = self._active, {}
        self.intake.clear()
        for device, manifest in abandoned.items():
            self._publisher.receipt(device, manifest, outcome, reason)

    async def _verdict(self, device: str, manifest: Manifest) -> Verdict | None:
        state = self._state()
        if state.is_open(manifest.round, manifest.attempt):
            if device not in state.participants:
                return Verdict(Outcome.REJECTED, "the device was not invited to this attempt")
            if device in state.declined:
                return Verdict(Outcome.REJECTED, "the device declined this attempt")
            return None
        attempt = await asyncio.to_thread(self._store.attempt, self._key(manifest))
        if attempt is None:
            return Verdict(Outcome.REJECTED, "there is no such round and attempt")
        if attempt.state is AttemptState.FAILED:
            return Verdict(Outcome.CLOSED, "the attempt ended without an aggregate")
        if state.phase is Phase.FINISHED:
            return Verdict(Outcome.CLOSED, "the federation is finished")
        return Verdict(Outcome.LATE, "the round was closed without this update")

    def _end_with(self, device: str, manifest: Manifest, verdict: Verdict) -> bool:
        """Forget the upload and send its receipt; whether that was worth a line."""
        self.forget(device)
        is_told = self._events.write(
            "update_refused",
            client=device,
            round=manifest.round,
            attempt=manifest.attempt,
            outcome=verdict.outcome.value,
            reason=verdict.reason,
        )
        self._publisher.receipt(device, manifest, verdict.outcome, verdict.reason)
        return is_told

    def _conflict(self, device: str, manifest: Manifest) -> None:
        """Another update was ended under the same name: a box and a copy of it, or of its private store, both take part."""
        verdict = Verdict(Outcome.CONFLICT, "another update of this round and attempt was ended before")
        if not self._end_with(device, manifest, verdict):
            return
        log.warning(
            "%s delivered two different updates of round %d, attempt %d; the first one counts. Two boxes seem to use its "
            "private store: stop one, or give it an identity of its own with `fedcg token create`",
            device,
            manifest.round,
            manifest.attempt,
        )

    async def _reject(self, checked: Checked) -> UpdateRefused:
        device, manifest = checked.received.device, checked.received.manifest
        await asyncio.to_thread(self._store.end_update, self._record(checked, Outcome.REJECTED))
        self._end_with(device, manifest, Verdict(Outcome.REJECTED, checked.reason))
        return UpdateRefused(manifest.round, manifest.attempt, device, checked.reason)

    def _record(self, checked: Checked, outcome: Outcome) -> UpdateRecord:
        manifest = checked.received.manifest
        return UpdateRecord(
            *self._key(manifest),
            client=checked.received.device,
            artifact=manifest.artifact.id,
            size=manifest.artifact.size,
            outcome=outcome,
            reason=checked.reason[:300],
            report=checked.report,
            manifest_at=checked.received.manifest_at,
            stored_at=self._clock(),
            distances=json.dumps(checked.distances) if checked.distances else None,
        )

    def _key(self, manifest: Manifest) -> tuple[str, int, int]:
        return (self._spec.federation, manifest.round, manifest.attempt)
