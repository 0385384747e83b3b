"""Requests of the owner's commands to the running agent: files in the private store, which the agent looks at in every turn of its loop.

    control/lock         held by an agent for as long as it answers
    control/ID.request   a request of a strict schema, at most 4 KB of JSON
    control/ID.answer    its reply: {"ok": true, "data": ...} or {"ok": false, "error": ...}

Only the store's user and root can open the folder (0700). No file needs to survive a power cut: a command that got no answer in time takes
its request back, and an agent that starts removes what an earlier one left.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from edge_client.errors import NotRunningError, OwnerRequestError
from edge_client.store.owner_record import MAX_REASON
from edge_client.store.private_store import CONTROL_FOLDER, is_locked
from fedcg.files import PRIVATE, READABLE
from fedcg.text_output import wrong_value
from fedcg.wire.messages.schemas import Sha256

MAX_PAUSE_S = 366 * 86_400.0
MAX_REQUEST_BYTES = 4096
MAX_REPLY_BYTES = 1 << 20
ANSWER_S = 15.0
"""The loop looks four times a second, unless its disk is slow."""
LOOK_EVERY_S = 0.02
_LOCK = "lock"
_SUFFIXES = (".request", ".answer", ".draft")
Reply = dict[str, Any]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    v: Literal[1] = 1


class PauseRequest(_Request):
    """Train no new round; `now`: abandon the one under way, too."""

    command: Literal["pause"] = "pause"
    for_s: Annotated[float, Field(gt=0, le=MAX_PAUSE_S)] | None = None
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    now: bool = False


class ResumeRequest(_Request):
    """End the pause."""

    command: Literal["resume"] = "resume"


class StatusRequest(_Request):
    """The live state."""

    command: Literal["status"] = "status"


class ApproveRequest(_Request):
    """Approve exactly this spec."""

    command: Literal["approve"] = "approve"
    spec: Sha256


class RevokeRequest(_Request):
    """Revoke the approval of a spec."""

    command: Literal["revoke"] = "revoke"
    spec: Sha256


OwnerRequest = PauseRequest | ResumeRequest | StatusRequest | ApproveRequest | RevokeRequest
_REQUESTS: TypeAdapter[OwnerRequest] = TypeAdapter(Annotated[OwnerRequest, Field(discriminator="command")])


def success(data: Reply) -> Reply:
    """The reply to a request that was carried out."""
    return {"ok": True, "data": data}


def failure(error: str) -> Reply:
    """The reply to a request that was not."""
    return {"ok": False, "error": error}


class OwnerRequests:
    """The agent's side: takes requests and writes their answers.

    Args:
        root: of the private store.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / CONTROL_FOLDER
        self._lock: IO[str] | None = None
        self._seen: set[str] = set()

    def open(self) -> None:
        """Begin to take requests; the caller holds the store's lock, so what is there was left by an earlier agent.

        Raises:
            OSError: the folder can't be made.
        """
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)
        for left in (path for suffix in _SUFFIXES for path in self._folder.glob(f"*{suffix}")):
            with contextlib.suppress(OSError):
                left.unlink()
        self._lock = (self._folder / _LOCK).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # waits for a command that looks at it

    def close(self) -> None:
        """Take no more requests."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def answer_all(self, answer: Callable[[OwnerRequest], Reply]) -> None:
        """Answer the requests that wait, each once; one that can't be read or taken away is left alone from then on.

        Raises:
            OSError: a request can't be read, or its answer not be written; the others are answered at the next look.
        """
        for path in sorted(self._folder.glob("*.request")) if self._lock is not None else ():
            if path.name in self._seen:
                continue
            self._seen.add(path.name)
            with contextlib.suppress(FileNotFoundError):  # whoever asked waits no more
                with path.open("rb") as file:
                    text = file.read(MAX_REQUEST_BYTES + 1)
                path.unlink()
                self._seen.discard(path.name)
                _write(path.with_suffix(".answer"), json.dumps(_reply_to(text, answer)), PRIVATE)


def _reply_to(text: bytes, answer: Callable[[OwnerRequest], Reply]) -> Reply:
    if len(text) > MAX_REQUEST_BYTES:
        return failure(f"a request has at most {MAX_REQUEST_BYTES} bytes")
    try:
        request = _REQUESTS.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        return failure(f"request field {'.'.join(map(str, first['loc'])) or '(root)'}: {wrong_value(first)}")
    return answer(request)


def ask_agent(root: Path, request: OwnerRequest) -> Reply:
    """Ask the running agent of a private store; returns the data of its reply.

    Raises:
        NotRunningError: no agent runs with this store.
        OwnerRequestError: it does not carry the request out, or gives no readable answer in time.
    """
    path = root / CONTROL_FOLDER / f"{secrets.token_hex(8)}.request"
    try:
        _check_running(root)
        try:
            _write(path, request.model_dump_json(), READABLE)  # root's, too, is the agent's to read
            reply = json.loads(_answer_to(path, root))
        finally:
            for suffix in _SUFFIXES:
                path.with_suffix(suffix).unlink(missing_ok=True)
    except PermissionError as error:
        raise OwnerRequestError(f"{root} belongs to the agent's user: run this as that user or root") from error
    except (OSError, ValueError) as error:
        raise OwnerRequestError(
            f"the agent of {root} gives no readable answer ({error}); look at `fedcg agent logs`"
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
                f"the agent is busy and did not answer within {ANSWER_S:g} s; look at `fedcg agent status` whether it was done, and try again"
            )
        time.sleep(LOOK_EVERY_S)


def _write(path: Path, text: str, mode: int) -> None:
    """A whole file or none."""
    draft = path.with_suffix(".draft")
    try:
        draft.touch(mode)
        draft.write_text(text, encoding="utf-8")
        draft.chmod(mode)
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
