"""The owner's control of the agent: requests and answers, pauses, approvals and daily limits.

Requests are files in the private store. The agent checks for them in every iteration of its loop.

    control/lock         held by the agent while it answers requests
    control/ID.request   a request with a strict schema, at most 4 KB of JSON
    control/ID.answer    the reply: {"ok": true, "data": ...} or {"ok": false, "error": ...}

Only the store's user and root can open the folder (0700). No file needs to survive a power cut: a command without an answer deletes its
request, and a starting agent deletes old files. `OwnerControl` belongs to the agent's loop. It never blocks and isn't called from other threads.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from edge_client.agent.reports import EventReporter, Progress
from edge_client.config import AgentConfig, PolicySection
from edge_client.errors import FirewallError, NotRunningError, OwnerRequestError, StoreError
from edge_client.firewall import check_kept, check_spec, widened
from edge_client.session.state import SessionState
from edge_client.store.checked_files import SentRecord
from edge_client.store.own_backbone import own_backbone
from edge_client.store.owner_record import MAX_REASON, NO_CODE, Consent, Pause, PauseFile, TrafficCounter
from edge_client.store.private_store import CONTROL_FOLDER, DeliveryRecord, PrivateStore
from fedcg.event_log import EventLog
from fedcg.files import READABLE, is_locked, replace_durably, take_lock
from fedcg.learning.errors import NetworkError, ProgramError
from fedcg.learning.program import Program
from fedcg.learning.spec import PROGRAM, TRAINER, FederationSpec
from fedcg.text_output import wrong_value
from fedcg.wire.artifacts.artifacts import codecs_for
from fedcg.wire.artifacts.payload import data_bytes, max_payload_bytes
from fedcg.wire.messages.schemas import DeclineReason, Sha256

MAX_PAUSE_S = 366 * 86_400.0
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 15.0
"""The loop checks four times a second, unless its disk is slow."""
LOOK_EVERY_S = 0.02
_LOCK = "lock"
_SUFFIXES = (".request", ".answer", ".new")
Reply = dict[str, Any]


class _Request(BaseModel, frozen=True, extra="forbid", strict=True):
    v: Literal[1] = 1


class PauseRequest(_Request):
    """Train no new round. With `now`, also abandon the current one."""

    command: Literal["pause"] = "pause"
    for_s: Annotated[float, Field(gt=0, le=MAX_PAUSE_S)] | None = None
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    now: bool = False


class ResumeRequest(_Request):
    """End the pause."""

    command: Literal["resume"] = "resume"


class StatusRequest(_Request):
    """Ask for the live state."""

    command: Literal["status"] = "status"


class DecisionRequest(_Request):
    """Approve exactly this spec, or revoke its approval."""

    command: Literal["approve", "revoke"]
    spec: Sha256


OwnerRequest = PauseRequest | ResumeRequest | StatusRequest | DecisionRequest
_REQUESTS: TypeAdapter[OwnerRequest] = TypeAdapter(Annotated[OwnerRequest, Field(discriminator="command")])


def success(data: Reply) -> Reply:
    """The reply to a request that was carried out."""
    return {"ok": True, "data": data}


def failure(error: str) -> Reply:
    """The reply to a request that was not carried out."""
    return {"ok": False, "error": error}


class OwnerRequests:
    """The agent's side: reads requests and writes answers.

    Args:
        root: of the private store.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / CONTROL_FOLDER
        self._lock: IO[str] | None = None
        self._seen: set[str] = set()

    def open(self) -> None:
        """Start accepting requests. The caller holds the store's lock, so existing files are from an earlier agent.

        Raises:
            OSError: the folder can't be created.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        for left in (path for suffix in _SUFFIXES for path in self._folder.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):
                left.unlink()
        self._lock = (self._folder / _LOCK).open("w")
        take_lock(self._lock, None)  # waits for a command that is testing it

    def close(self) -> None:
        """Stop accepting requests."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def answer_all(self, answer: Callable[[OwnerRequest], Reply]) -> None:
        """Answer each waiting request once. A request that can't be read or deleted is skipped from then on.

        Raises:
            OSError: a request can't be read, or its answer can't be written. The others are answered by the next call.
        """
        for path in sorted(self._folder.glob("*.request")) if self._lock is not None else ():
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            with contextlib.suppress(FileNotFoundError):  # the command has given up waiting
                with path.open("rb") as file:
                    text = file.read(MAX_REQUEST_BYTES + 1)
                path.unlink()
                self._seen.discard(path.name)
                replace_durably(path.with_suffix(".answer"), json.dumps(_reply_to(text, answer)))


def _reply_to(text: bytes, answer: Callable[[OwnerRequest], Reply]) -> Reply:
    if len(text) > MAX_REQUEST_BYTES:
        return failure(f"a request can have at most {MAX_REQUEST_BYTES} bytes")
    try:
        request = _REQUESTS.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return failure(f"request field {'.'.join(map(str, first['loc'])) or '(root)'}: {wrong_value(first)}")
    return answer(request)


def ask_agent(root: Path, request: OwnerRequest) -> Reply:
    """Send a request to the running agent of a private store and return the data of its reply.

    Raises:
        NotRunningError: no agent runs with this store.
        OwnerRequestError: the agent refuses the request, or gives no readable answer in time.
    """
    path = root / CONTROL_FOLDER / f"{secrets.token_hex(8)}.request"
    try:
        _check_running(root)
        try:
            # readable, so that the agent can also read a request by root
            replace_durably(path, request.model_dump_json(), READABLE)
            reply = json.loads(_answer_to(path, root))
        finally:
            for suffix in _SUFFIXES:
                path.with_suffix(suffix).unlink(missing_ok=True)
    except PermissionError as error:
        raise OwnerRequestError(f"{root} belongs to the agent's user: run this as that user or root") from error
    except (OSError, ValueError) as error:
        raise OwnerRequestError(
            f"the agent of {root} gives no readable answer ({error}); check `fedcg agent logs`"
        ) from error
    if not isinstance(reply, dict) or reply.get("ok") is not True or not isinstance(reply.get("data"), dict):
        raise OwnerRequestError(str(reply.get("error") if isinstance(reply, dict) else reply))
    return dict(reply["data"])


def _check_running(root: Path) -> None:
    if not is_locked(root / CONTROL_FOLDER / _LOCK):
        raise NotRunningError(f"no agent runs with the store {root}: start it with `fedcg agent run`")


def _answer_to(path: Path, root: Path) -> bytes:
    deadline = time.monotonic() + ANSWER_S
    while True:
        is_late = time.monotonic() > deadline
        with contextlib.suppress(FileNotFoundError), path.with_suffix(".answer").open("rb") as answer:
            return answer.read(MAX_REPLY_BYTES)
        _check_running(root)
        if is_late:
            raise OwnerRequestError(
                f"the agent is busy and did not answer within {ANSWER_S:g} s; check with `fedcg agent status` whether it was done, then retry"
            )
        time.sleep(LOOK_EVERY_S)


MB = 1_000_000
HEADER_BYTES, CLASS_BYTES, CODEC_BYTES = 4096, 128, 32
"""Bounds on an update's header: facts and figures, report numbers per class, the codec of a tensor in addition to its name."""
WITHHELD = "withheld"  # outcome of an update that the owner's policy forbids after it was created
Refusal = tuple[DeclineReason, str]


class OwnerControl:
    """The owner's decisions for one agent.

    Args:
        config: of this device.
        store: its private store.
        events: the event log.
        wall: unix seconds.

    Raises:
        StoreError: a file with decisions is damaged or can't be read.

    Attributes:
        sent: the record of everything that leaves the device.
        traffic: the bytes transferred today.
    """

    def __init__(self, config: AgentConfig, store: PrivateStore, events: EventLog, wall: Callable[[], float]) -> None:
        self._config = config
        self._store = store
        self._events = events
        self._wall = wall
        self._consent = Consent(store.root)
        self._consent.read()  # a damaged file stops the agent's start with an error that names the next step
        self._pauses = PauseFile(store.root)
        self._pause = self._pauses.read()
        self._limits = (config.policy.max_upload_mb_per_day, config.policy.max_download_mb_per_day)
        self._update_bytes: tuple[str, int] = ("", 0)
        self.sent = SentRecord(store.root, config.federation, wall)
        self.traffic = TrafficCounter(store.root, wall)

    # Specs

    def policy_for(self, digest: str) -> PolicySection:
        """The policy that applies to a stored spec, including its approval."""
        return self._consent.policy_for(self._config.policy, self._store.spec(digest))

    def check(self, spec: FederationSpec) -> Refusal | None:
        """Check whether a spec is within the policy or approved. A spec that an approval would admit is recorded as waiting."""
        policy = self._config.policy
        try:
            network = spec.network.with_backbone(own_backbone(self._config, self._store, spec))
        except NetworkError as error:
            return DeclineReason.SPEC_REFUSED, str(error)
        refusal = check_spec(spec, self._consent.policy_for(policy, spec), network) or self._of_program(spec)
        if refusal is None:
            self._consent.settle(spec.digest)
        elif (incurable := check_spec(spec, widened(policy, spec), network)) is not None:
            return incurable
        elif refusal[0] is not DeclineReason.SPEC_REFUSED:
            reason, detail = refusal
            if self._consent.wait_for(spec.digest, reason, detail, self._wall()):
                self._events.write("approval_needed", spec=spec.digest, reason=reason.value, detail=detail)
        return refusal

    def _of_program(self, spec: FederationSpec) -> Refusal | None:
        """Why this device's own program may not run under a spec: its code has changed, or none is configured."""
        program = Program.of_source(self._config.data.root)
        if program is None:
            advice = 'this federation trains each device\'s own program: set `program = "module:function"` under [training] in agent.toml'
            return (DeclineReason.SPEC_REFUSED, advice) if spec.network.split in (PROGRAM, TRAINER) else None
        try:
            digest = program.digest()
        except ProgramError as error:
            return DeclineReason.SPEC_REFUSED, str(error)
        known = self._consent.read().programs.get(spec.digest)
        if known is None:  # the setting in agent.toml is the owner's permission
            self._consent.allow_program(spec.digest, digest)
            self._events.write("program_allowed", program=program.name, sha256=digest)
        elif known != digest:
            why = "has changed" if known != NO_CODE else "may not run any more: its owner revoked the permission"
            before = "" if known == NO_CODE else f", before {known[:12]}"
            return (
                DeclineReason.NEEDS_APPROVAL,
                f"the code of program {program.name} {why}: sha256 {digest[:12]}{before}",
            )
        return None

    def outbox_may_leave(self, reporter: EventReporter) -> bool:
        """Whether policy and approvals still allow the update in the outbox. A forbidden update is recorded as withheld."""
        generation = self._store.generations.newest()
        if generation is None or (entry := self._store.outbox(generation)) is None:
            return True
        data, policy = self._store.generations.update_bytes(generation), self.policy_for(generation.spec)
        try:
            check_kept(data, policy, self._config.device)
        except FirewallError as error:
            reporter.refusals.note("outbox", error)
            at = entry.round_attempt
            self._store.save_delivery(DeliveryRecord(entry.artifact, at.round, at.attempt, WITHHELD, str(error)))
            return False
        return True

    # New rounds

    def obstacle(self, state: SessionState) -> Refusal | None:
        """Why no new round is trained now, with a text that stays on this device. Ends a pause whose time is over."""
        if self._pause is not None and self._pause.is_over(self._wall()):
            self._resume("the pause is over")
        if self._pause is not None:
            return DeclineReason.PAUSED, self._pause.reason or "paused by the owner of this device"
        excess = self._daily_excess(state)
        return (DeclineReason.DAILY_LIMIT, excess) if excess else None

    def _daily_excess(self, state: SessionState) -> str:
        """The daily limit that the open round would exceed, as text; empty if none."""
        offer, (most_up, most_down) = state.offer, self._limits
        if offer is None or (most_up is None and most_down is None):
            return ""
        today, aggregate = self.traffic.today(), offer.aggregate
        down = 0 if aggregate.id in state.stored else aggregate.size
        for name, most, used, needed in (
            ("max_upload_mb_per_day", most_up, today.up, self._expected_update(offer.spec.id)),
            ("max_download_mb_per_day", most_down, today.down, down),
        ):
            if most is not None and used + needed > most * MB:
                return (
                    f"policy.{name} is {most}: {used / MB:.1f} MB used today, and a round needs up to {needed / MB:.1f} MB; "
                    "training continues after midnight UTC"
                )
        return ""

    def _expected_update(self, digest: str) -> int:
        """The largest size of an update under a spec; 0 if the spec is not stored."""
        if self._update_bytes[0] != digest and (spec := self._store.spec(digest)) is not None:
            self._update_bytes = digest, update_bytes(spec)
        return self._update_bytes[1] if self._update_bytes[0] == digest else 0

    def close(self) -> None:
        """Save the day's byte count."""
        with contextlib.suppress(OSError):
            self.traffic.write()
        self.sent.close()

    # Requests

    def answer(self, request: OwnerRequest, state: SessionState, progress: Progress | None) -> Reply:
        """Carry out a request of the owner."""
        try:
            if isinstance(request, StatusRequest):
                return success(self._status(state, progress))
            if isinstance(request, PauseRequest):
                return success(self._start_pause(request))
            if isinstance(request, ResumeRequest):
                was_paused = self._pause is not None
                if was_paused:
                    self._resume("`fedcg agent resume`")
                return success({"was_paused": was_paused})
            return success(decide(self._config, self._store, self._events, request, self._wall()))
        except (OSError, StoreError, OwnerRequestError, ProgramError) as error:
            return failure(str(error))

    def _start_pause(self, request: PauseRequest) -> dict[str, Any]:
        now = self._wall()
        until = None if request.for_s is None else now + request.for_s
        pause = Pause(since=now, until=until, reason=request.reason)
        self._pauses.write(pause)
        self._pause = pause
        self._events.write("agent_paused", until=until, reason=request.reason)
        return {"until": until, "reason": request.reason}

    def _resume(self, reason: str) -> None:
        self._pauses.write(None)
        self._pause = None
        self._events.write("agent_resumed", reason=reason)

    def _status(self, state: SessionState, progress: Progress | None) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "now": describe(state, progress),
            "in_session": state.welcomed,
            "trainer": state.trainer.value,
            "offered": None if state.offered is None else str(state.offered),
            "obstacle": None if state.obstacle is None else state.obstacle.value,
            "bytes_today": self.traffic.today().model_dump(include={"up", "down"}),
        }


def decide(
    config: AgentConfig, store: PrivateStore, events: EventLog, request: DecisionRequest, now: float
) -> dict[str, Any]:
    """Record or revoke the owner's approval of a spec and of the program's current code. The caller holds the store's lock.

    Raises:
        OwnerRequestError: unknown spec, or it is not approved.
        ProgramError: the program no longer exists.
    """
    digest, consent, is_approval = request.spec, Consent(store.root), request.command == "approve"
    if is_approval and store.spec(digest) is None:
        raise OwnerRequestError(f"no spec {digest} in the store; `fedcg agent approve --list` lists waiting specs")
    if is_approval:
        if (program := Program.of_source(config.data.root)) is not None:
            code, waits = program.digest(), consent.read().waiting.get(digest)
            if waits is not None and "sha256 " in waits.detail and code[:12] not in waits.detail:
                changed = f"the code of program {program.name} has changed again: sha256 {code[:12]}"
                consent.wait_for(digest, DeclineReason.NEEDS_APPROVAL, changed, now)
                raise OwnerRequestError(f"{changed}; nothing was approved: review the code, then run the command again")
            consent.allow_program(digest, code)
        consent.approve(digest, now)
    elif not consent.revoke(digest):
        raise OwnerRequestError(f"spec {digest} is not approved; `fedcg agent approve --list` lists approved specs")
    events.write("approved" if is_approval else "approval_revoked", spec=digest)
    return {"spec": digest, "approved": is_approval}


def describe(state: SessionState, progress: Progress | None) -> str:
    """A short description of what the agent is doing, and whether it is paused."""
    if progress is not None:
        now = f"{progress.at}: {progress.phase}, step {progress.step} of {progress.steps}"
    elif state.delivery is not None:
        now = f"{state.delivery.round_attempt}: delivering its update"
    else:
        return state.release_reason or "waiting for a round"
    return f"{now}; then paused" if state.obstacle is DeclineReason.PAUSED else now


def update_bytes(spec: FederationSpec) -> int:
    """The largest possible size of this device's update under a spec: numbers (assumed incompressible), names and header."""
    layouts = {part: spec.layouts.get(part, ()) for part in spec.upload}
    payload = max_payload_bytes(layouts, codecs_for(layouts, spec.codec, frozenset(spec.with_base)))
    codecs = sum(len(part.value) + len(one.name) + CODEC_BYTES for part, some in layouts.items() for one in some)
    return payload + payload // 128 + HEADER_BYTES + codecs + CLASS_BYTES * len(spec.classes)


def part_bytes(spec: FederationSpec) -> dict[str, int]:
    """Bytes of each part's numbers in an update, in the codec's format, before compression."""
    layouts = [{part: spec.layouts.get(part, ())} for part in spec.upload]
    codecs = [codecs_for(one, spec.codec, frozenset(spec.with_base)) for one in layouts]
    return {part.value: data_bytes(one, codec) for part, one, codec in zip(spec.upload, layouts, codecs, strict=True)}
