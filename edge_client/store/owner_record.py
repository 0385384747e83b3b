"""The owner's decisions and the day's byte counts, in small files in the private store that are replaced atomically.

consent.json    specs that exceed the policy, by digest: waiting for approval, or approved
pause.json      the pause, if any
traffic.json    bytes of updates and aggregates on the current day (UTC)
"""

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from edge_client.config import PolicySection
from edge_client.firewall import widened
from edge_client.store.checked_files import damaged, read_json, write_json
from fedcg.learning.spec import FederationSpec
from fedcg.wire.messages.schemas import DeclineReason, Sha256

WRITTEN_EVERY_BYTES = 1_000_000
MAX_REASON = 200
MOST_WAITING = 32
NO_CODE = "0" * 64
"""Instead of a program's digest: the owner revoked the permission."""
_Seconds = Annotated[float, Field(ge=0.0, le=1e11, allow_inf_nan=False)]


class _File(BaseModel, frozen=True, extra="forbid", strict=True):
    format: Literal[1] = 1


_Kept = TypeVar("_Kept", bound=_File)


class WaitingSpec(_File):
    """A spec that exceeds the policy. `since` in unix seconds."""

    since: _Seconds
    reason: Annotated[str, Field(max_length=64)]
    detail: Annotated[str, Field(max_length=4096)]


class ConsentFile(_File):
    """Specs by digest: waiting specs, approval times in unix seconds, and the digest of the program that may run under each spec."""

    waiting: dict[Sha256, WaitingSpec] = {}
    approved: dict[Sha256, _Seconds] = {}
    programs: dict[Sha256, Sha256] = {}


class Pause(_File):
    """A pause by the owner. Times in unix seconds; with `until` None, only `fedcg agent resume` ends it."""

    since: _Seconds
    until: _Seconds | None = None
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""

    def is_over(self, now: float) -> bool:
        """Whether its time has passed."""
        return self.until is not None and now >= self.until


class Consent:
    """The owner's approvals in one private store.

    Args:
        root: of the store.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "consent.json"

    def read(self) -> ConsentFile:
        """Waiting and approved specs.

        Raises:
            StoreError: the file is damaged or can't be read.
        """
        return _read(self._path, ConsentFile) or ConsentFile()

    def policy_for(self, policy: PolicySection, spec: FederationSpec | None) -> PolicySection:
        """The policy that applies to a spec, widened if exactly this spec was approved."""
        is_approved = spec is not None and spec.digest in self.read().approved
        return widened(policy, spec) if spec is not None and is_approved else policy

    def wait_for(self, digest: str, reason: DeclineReason, detail: str, now: float) -> bool:
        """Record that a spec waits for approval. Returns whether that is new."""
        kept = self.read()
        if digest in kept.waiting and kept.waiting[digest].detail == detail[:4096]:
            return False
        newest = sorted(kept.waiting.items(), key=lambda item: item[1].since)[-MOST_WAITING + 1 :]
        one = WaitingSpec(since=now, reason=reason.value, detail=detail[:4096])
        self._write(kept.model_copy(update={"waiting": {**dict(newest), digest: one}}))
        return True

    def settle(self, digest: str) -> None:
        """Remove a spec from the waiting list, because the policy allows it now."""
        kept = self.read()
        if digest in kept.waiting:
            waiting = {name: one for name, one in kept.waiting.items() if name != digest}
            self._write(kept.model_copy(update={"waiting": waiting}))

    def approve(self, digest: str, now: float) -> None:
        """Approve exactly this spec."""
        self.settle(digest)
        kept = self.read()
        self._write(kept.model_copy(update={"approved": {**kept.approved, digest: now}}))

    def allow_program(self, digest: str, program: str) -> None:
        """Allow a program, identified by the sha256 of its code, under a spec."""
        kept = self.read()
        self._write(kept.model_copy(update={"programs": {**kept.programs, digest: program}}))

    def revoke(self, digest: str) -> bool:
        """Revoke the approval of a spec and the permission of its program. Returns whether there was one."""
        kept = self.read()
        approved = {name: at for name, at in kept.approved.items() if name != digest}
        programs = {name: NO_CODE if name == digest else code for name, code in kept.programs.items()}
        self._write(kept.model_copy(update={"approved": approved, "programs": programs}))
        return digest in kept.approved or kept.programs.get(digest, NO_CODE) != NO_CODE

    def _write(self, content: ConsentFile) -> None:
        _write(self._path, content)


class PauseFile:
    """The owner's pause, which survives restarts of the agent."""

    def __init__(self, root: Path) -> None:
        self._path = root / "pause.json"

    def read(self) -> Pause | None:
        """The pause, or None.

        Raises:
            StoreError: the file is damaged or can't be read.
        """
        return _read(self._path, Pause)

    def write(self, pause: Pause | None) -> None:
        """Save a pause, or remove it with None."""
        if pause is None:
            self._path.unlink(missing_ok=True)
        else:
            _write(self._path, pause)


class DayTraffic(_File):
    """Bytes of one day (UTC, as 2026-11-23): updates sent, chunks received."""

    day: Annotated[str, Field(max_length=10)]
    up: Annotated[int, Field(ge=0)] = 0
    down: Annotated[int, Field(ge=0)] = 0


class TrafficCounter:
    """Counts the day's bytes. After a power cut, at most 1 MB of received bytes is missing.

    Args:
        root: of the store.
        wall: unix seconds.
    """

    def __init__(self, root: Path, wall: Callable[[], float]) -> None:
        self._path = root / "traffic.json"
        self._wall = wall
        self._kept = _read(self._path, DayTraffic)
        self._unwritten = 0

    def today(self) -> DayTraffic:
        """The bytes of the current day."""
        day = f"{datetime.fromtimestamp(self._wall(), timezone.utc):%Y-%m-%d}"
        if self._kept is None or self._kept.day != day:
            self._kept = DayTraffic(day=day)
        return self._kept

    def sent(self, count: int) -> None:
        """Count the bytes of an update about to be sent. Saved when this returns."""
        today = self.today()
        self._kept = today.model_copy(update={"up": today.up + count})
        self.write()

    def received(self, count: int) -> None:
        """Count received bytes."""
        today = self.today()
        self._kept = today.model_copy(update={"down": today.down + count})
        self._unwritten += count
        if self._unwritten >= WRITTEN_EVERY_BYTES:
            self.write()

    def write(self) -> None:
        """Save the count."""
        self._unwritten = 0
        _write(self._path, self.today())


def _read(path: Path, model: type[_Kept]) -> _Kept | None:
    try:
        return model.model_validate(kept) if (kept := read_json(path)) else None
    except ValidationError as error:
        raise damaged(path) from error


def _write(path: Path, content: _File) -> None:
    write_json(path, content.model_dump(mode="json"))
