"""Decides an update's outcome: before transfer by its manifest and the database, afterwards by its content."""

import errno
import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from coordinator.errors import ValidationError
from coordinator.rounds.records import AttemptRecord, AttemptState, ParticipantState, UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates.robustness import Yardstick
from coordinator.updates.screening import typical_distances
from coordinator.updates.upload_windows import Received
from coordinator.updates.validation import base_in, max_update_bytes, validate_update
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import Manifest, Outcome


@dataclass(eq=False)
class UpdateChecks:
    """Decides the outcome of one federation's updates; used by one thread.

    Args:
        spec: the federation's spec.
        store: the database.
        artifacts: the store for accepted updates.
        clock: unix time.

    Attributes:
        clock: the given clock.
    """

    spec: FederationSpec
    store: Store
    artifacts: ArtifactStore
    clock: Callable[[], float]
    _yardstick: Yardstick | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._max_bytes = max_update_bytes(self.spec)

    def ended(self, device: str, manifest: Manifest) -> UpdateRecord | None:
        """The record of an earlier update of this device and attempt, if any."""
        return self.store.update(self.spec.federation, manifest.at, device)

    def why_second(self, earlier: UpdateRecord) -> tuple[Outcome, str]:
        """The outcome if another update of the same device and attempt was stored: a conflict, unless this coordinator was recovered since."""
        if 1000 * earlier.stored_at < self.store.epoch():  # the epoch began as the time of the recovery
            return Outcome.LATE, "another one counts, from before this coordinator was restored"
        return Outcome.CONFLICT, "another update for this round and attempt has already ended"

    def end_without_check(self, device: str, manifest: Manifest) -> tuple[Outcome, str] | None:
        """An update's outcome without a check of its content; None if its attempt accepts it."""
        attempt = self.store.attempt(self.spec.federation, manifest.at)
        if attempt is None or attempt.state is not AttemptState.COLLECTING:
            return self.why_late(manifest)
        invited = self.store.participants(self.spec.federation, manifest.at)
        answer = next((each.state for each in invited if each.client == device), None)
        if answer is not None and answer is not ParticipantState.DECLINED:
            return None
        return Outcome.REJECTED, f"the device {'declined' if answer else 'was not invited to'} this attempt"

    def why_too_large(self, manifest: Manifest) -> str | None:
        """Why an update is rejected before any chunk is requested; None if it is not."""
        size = manifest.artifact.size
        if size <= self._max_bytes:
            return None
        return f"it has {size} bytes; an update of this federation has at most {self._max_bytes}"

    def why_late(self, manifest: Manifest) -> tuple[Outcome, str]:
        """The outcome of an update whose attempt is not collecting."""
        attempt = self.store.attempt(self.spec.federation, manifest.at)
        if attempt is None:
            return Outcome.REJECTED, "there is no such round and attempt"
        if attempt.state is AttemptState.FAILED:
            return Outcome.CLOSED, "the attempt ended without an aggregate"
        last = self.store.federation(self.spec.federation).policy.rounds
        if self.store.aggregate(self.spec.federation, last) is not None:
            return Outcome.CLOSED, "the federation is finished"
        return Outcome.LATE, "the round was closed without this update"

    def check(self, received: Received) -> UpdateRecord:
        """Validate a received update and, if valid, store it durably.

        Raises:
            OSError: an error of the coordinator's disk, not of the update.
        """
        manifest, device = received.manifest, received.device
        attempt = self.store.attempt(self.spec.federation, manifest.at)
        assert attempt is not None
        try:
            yardstick = self._yardstick_for(attempt)
            artifact = validate_update(received.file.read_bytes(), self.spec, device, manifest.at, yardstick.base)
            distances = yardstick.distances(artifact.parts)
            yardstick.check(device, distances)
        except ValidationError as error:
            return self.rejected(device, manifest, received.manifest_at, error.reason)
        self.artifacts.adopt(received.file, manifest.artifact.id)
        report, facts = artifact.header.report, {**artifact.header.versions, **artifact.header.determinism}
        return replace(
            self._record(device, manifest, received.manifest_at, Outcome.ACCEPTED, ""),
            report=None if report is None else report.model_dump_json(exclude_none=True),
            distances=json.dumps(distances) if distances else None,
            facts=json.dumps(facts),
        )

    def rejected(self, device: str, manifest: Manifest, manifest_at: float, reason: str) -> UpdateRecord:
        """The record of an update that is not merged."""
        return self._record(device, manifest, manifest_at, Outcome.REJECTED, reason[:300])

    def store_end(self, record: UpdateRecord) -> UpdateRecord | None:
        """Store an update's outcome; see `Store.end_update`. The file of a valid update that is not stored is deleted."""
        stored = self.store.end_update(record)
        is_stored = stored is not None and stored.artifact == record.artifact
        if record.outcome is Outcome.ACCEPTED and not is_stored:
            self.artifacts.delete(record.artifact)  # for other records, the id is only the device's announcement
        return stored

    def _yardstick_for(self, attempt: AttemptRecord) -> Yardstick:
        """The base and typical distances for measuring an attempt's updates; created once per round."""
        if self._yardstick is None or self._yardstick.base.id != attempt.base:
            base = self._base(attempt.base)
            typical = typical_distances(self.store, self.spec.federation, attempt.round - 1)
            self._yardstick = Yardstick(base, typical)
        return self._yardstick

    def _base(self, artifact: str) -> Base:
        """The aggregate that an attempt starts from. If it is invalid, the coordinator's disk is at fault: an OSError."""
        try:
            return base_in(self.artifacts.get(artifact), self.spec, artifact)
        except WireError as error:
            raise OSError(errno.EIO, str(error), str(self.artifacts.path(artifact))) from error

    def _record(
        self, device: str, manifest: Manifest, manifest_at: float, outcome: Outcome, reason: str
    ) -> UpdateRecord:
        return UpdateRecord(
            self.spec.federation,
            manifest.round,
            manifest.attempt,
            client=device,
            artifact=manifest.artifact.id,
            size=manifest.artifact.size,
            outcome=outcome,
            reason=reason,
            report=None,
            manifest_at=manifest_at,
            stored_at=self.clock(),
        )
