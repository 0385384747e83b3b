"""Handling of all requests that make changes: each Idempotency-Key is used once, and the audit log gets two lines.

Such routes use the route class `ChangeRoute`: `APIRouter(route_class=ChangeRoute)`.
"""

import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from itertools import chain, islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, TypeVar

import anyio
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute
from sqlalchemy.exc import SQLAlchemyError

from coordinator.http.access import FORM_FIELD, READING, access_of, address_of, form_fields, is_form, unauthorised
from coordinator.http.refusals import UNFORESEEN, USED_KIND, CountedEvent, ProblemError, problem_of, too_many
from coordinator.members.api_tokens import Identity
from coordinator.storage.member_store import ApiStore
from coordinator.token_buckets import Buckets, Rate
from fedcg.event_log import ROTATE_BYTES, EventLog, EventValue, log_text
from fedcg.files import advice_for, append_line

KEY_HEADER = "Idempotency-Key"
MAX_CHANGED = 8000
"""Characters of a request's content in the audit log; a change with more is refused."""
MAX_TEXT, MAX_ITEMS = 1000, 30
"""Of these, characters of one text (a plan), and items of one list (classes)."""
SECRET_FIELDS = (FORM_FIELD, "token", "secret", "password")
MAX_NAME = 100
"""Characters of a name in a request's path, and of an address that a proxy forwards."""
# failed changes of one token: each writes audit lines although nothing changed
FAILING = Rate(200, 1 / 6)
DAY_S = 86_400.0
MAX_WAITING = 3
"""Plans that may wait while another one is completed."""
_KEY = re.compile(r"[!-~]{1,255}")
log = logging.getLogger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
Made = TypeVar("Made")


class AuditLog:
    """The audit log: one line before and one after each change, durable when `write` returns.

    Args:
        path: the file. The previous file has the suffix `.old.jsonl`; older ones have the time of their last line.
        keep_days: files whose last line is older are deleted.
    """

    def __init__(self, path: Path, keep_days: int) -> None:
        self.path = path
        self._keep_s = keep_days * DAY_S
        self._writing = threading.Lock()
        self._last = max((line["t"] for line in self.last(1)), default=0.0)  # the clock may have been set back since

    def write(self, fields: Mapping[str, EventValue]) -> None:
        """Append a line.

        Raises:
            OSError: writing failed; the file is unchanged.
        """
        with self._writing:
            at = round(max(time.time(), self._last + 0.001), 3)  # unique among all lines
            if append_line(self.path, json.dumps({"t": at, **fields})) > ROTATE_BYTES:
                self._rotate()
            self._last = at

    def last(self, limit: int, identity: str = "", before: float | None = None) -> list[dict[str, Any]]:
        """The last lines of the newest two files, newest first.

        Args:
            limit: maximum number of lines.
            identity: only lines about changes of this identity.
            before: only lines with an earlier time `t`.
        """
        files = (self.path, self.path.with_suffix(".old.jsonl"))
        found = (
            line
            for line in chain.from_iterable(map(_backwards, files))
            if (before is None or line["t"] < before) and identity in ("", line.get("identity"))
        )
        return list(islice(found, limit))

    def _rotate(self) -> None:
        earlier = self.path.with_suffix(".old.jsonl")
        with suppress(OSError):
            if earlier.exists():
                earlier.replace(self.path.with_suffix(f".{earlier.stat().st_mtime_ns}.jsonl"))
            self.path.replace(earlier)
            for file in self.path.parent.glob(f"{self.path.stem}.*.jsonl"):
                if file.stat().st_mtime < time.time() - self._keep_s:
                    file.unlink()


class Changes:
    """The audit log, and the keys that requests have used.

    Args:
        store: keeps used keys.
        audit: the audit log, for permitted changes.
        events: the event log, which counts refused requests. They are not in the audit log, so strangers can't fill it.
    """

    def __init__(self, store: ApiStore, audit: AuditLog, events: EventLog) -> None:
        self._store = store
        self.audit = audit
        self._refused = CountedEvent(events, "api_refused")
        self._failing: Buckets[str] = Buckets(FAILING)

    async def make(self, request: Request, handler: Handler) -> Response:
        """Answer a request that makes a change. `require` writes the intent once the role suffices. Errors propagate to the caller."""
        body = await request.body()
        intended: dict[str, EventValue] = {}
        key = ""

        async def intend(identity: Identity) -> None:
            nonlocal key
            if not intended:
                if not self._failing.take(identity.token_id):
                    raise too_many("changes that failed", self._failing.wait_s(identity.token_id))
                about = _about(request, identity)
                await run_in_threadpool(self._intend, about, body, request.headers.get("Content-Type", ""))
                intended.update(about)
                key = await self._use_key(request, identity)

        request.state.intend = intend
        try:
            identity = await access_of(request).identify(request)
            if identity is None:
                raise unauthorised()  # noqa: TRY301 - counted below
            request.state.identity = identity
            response = await handler(request)
        except Exception as error:
            status = problem_of(error).status
            if key and status != UNFORESEEN:
                with suppress(SQLAlchemyError):  # keeps the original error
                    await run_in_threadpool(self._store.free_key, str(intended["token"]), key)
            await self._end(request, intended, status)
            raise
        await self._end(request, intended, response.status_code)
        return response

    def _intend(self, intended: Mapping[str, EventValue], body: bytes, media: str) -> None:
        try:
            self.audit.write({"event": "intent", **intended, "changed": _content(body, media)})
        except OSError as error:
            advice = advice_for(error, self.audit.path.parent)
            raise ProblemError(
                503, f"nothing was changed: the audit log can't be written ({error}). {advice}"
            ) from error

    async def _end(self, request: Request, intended: Mapping[str, EventValue], status: int) -> None:
        """Write the outcome of a permitted change, or count a refused request."""
        if not intended and status >= 400:
            self.count_refused(request)
        elif intended:
            if status < 400:
                self._failing.give_back(str(intended["token"]))
            try:
                await run_in_threadpool(self.audit.write, {"event": "outcome", **intended, "outcome": status})
            except OSError as error:
                log.error("can't write the outcome of a change to the audit log (its intent is there): %s", error)  # noqa: TRY400

    def count_refused(self, request: Request) -> None:
        """Count a request without a valid token or without the required role."""
        identity = getattr(request.state, "identity", None)
        name = None if identity is None else identity.name
        self._refused.count(address=address_of(request), identity=name, route=_route(request))

    async def _use_key(self, request: Request, identity: Identity) -> str:
        """Use up the key of a request, if it has one, so that the change is made once. A refused change frees the key."""
        key = request.headers.get(KEY_HEADER, "")
        if not key:
            return ""
        if not _KEY.fullmatch(key):
            raise ProblemError(422, f"{KEY_HEADER}: use 1 to 255 printable ASCII characters, e.g. a UUID")
        if not await run_in_threadpool(self._store.use_key, identity.token_id, key, time.time()):
            raise ProblemError(
                409,
                f"this {KEY_HEADER} was used before: check whether that change was made; a further change needs a new key",
                kind=USED_KIND,
            )
        return key


def _backwards(file: Path) -> Iterator[dict[str, Any]]:
    """The complete lines of a file, last one first; none if the file does not exist."""
    try:
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            end = data.rfind(b"\n") + 1
            while end:
                start = data.rfind(b"\n", 0, end - 1) + 1
                with suppress(ValueError):  # a line damaged by a power cut
                    yield json.loads(data[start:end])
                end = start
    except (FileNotFoundError, ValueError):  # an empty file can't be mapped
        return


async def in_turn(request: Request, create: Callable[[], Made], turns: str = "creating") -> Made:
    """Complete a plan after all earlier ones, unless the client has disconnected by then.

    Args:
        request: the client's.
        create: completes the plan.
        turns: name of the limiter in the application's state.

    Raises:
        ProblemError: 503, too many plans are waiting, or the client has disconnected.
    """
    limiter: anyio.CapacityLimiter = getattr(request.app.state, turns)
    if limiter.statistics().tasks_waiting >= MAX_WAITING:
        raise ProblemError(
            503, f"{MAX_WAITING} plans are waiting already; try again in a minute", headers={"Retry-After": "60"}
        )
    async with limiter:
        if await request.is_disconnected():
            raise ProblemError(503, "nothing was created: the client disconnected")
        return await run_in_threadpool(create)


class ChangeRoute(APIRoute):
    """A route whose changes are made once per key and audited. Reading requests pass unchanged.

    FastAPI reads the body before it resolves dependencies, so the route's `require` is called here first.
    """

    def get_route_handler(self) -> Handler:
        """The handler of a request."""
        read, needed = super().get_route_handler(), [one.dependency for one in self.dependencies if one.dependency]

        async def handler(request: Request) -> Response:
            for identified in needed:
                await identified(request, None)
            return await read(request)

        async def handle(request: Request) -> Response:
            if request.method in READING:
                return await handler(request)
            changes: Changes = request.app.state.changes
            return await changes.make(request, handler)

        return handle


def _about(request: Request, identity: Identity) -> dict[str, EventValue]:
    """The fields of both lines about a change; each one has a maximum length."""
    return {
        "change": secrets.token_hex(8),
        "identity": identity.name,
        "role": identity.role.value,
        "token": identity.token_id,
        "address": log_text(address_of(request), MAX_NAME),
        "route": _route(request),
        "names": [log_text(value, MAX_NAME) for value in request.path_params.values()],
    }


def _route(request: Request) -> str:
    """Method and path template of a request."""
    return f"{request.method} {request.scope['route'].path}"


def _content(body: bytes, media: str) -> str:
    """The content of any request body, without secrets. Long texts and lists are cut, with the number of omitted items.

    Raises:
        ProblemError: 422, it is longer than an audit line, so the change is refused.
    """
    try:
        values = form_fields(body) if is_form(media) else json.loads(body or b"{}", object_pairs_hook=_once)
        if isinstance(values, dict):
            values = {name: "(hidden)" if name in SECRET_FIELDS else value for name, value in values.items()}
        content = json.dumps(_shortened(values))
    except _RepeatedFieldError:
        raise
    except (ValueError, RecursionError, ProblemError):
        return "(not readable)"
    if len(content) > MAX_CHANGED:
        raise ProblemError(422, "the request is too long for a line of the audit log: leave out what is not needed")
    return content


class _RepeatedFieldError(ProblemError):
    """A request contains a field twice, so its value is ambiguous."""


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """The values of a JSON object.

    Raises:
        _RepeatedFieldError: 422.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        raise _RepeatedFieldError(422, "the request contains a field more than once")
    return values


def _shortened(value: object) -> object:
    """A JSON value with long texts and lists cut."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return f"{value[:MAX_TEXT]}… and {len(value) - MAX_TEXT} more"
    if isinstance(value, list):
        more = [f"… and {len(value) - MAX_ITEMS} more"] if len(value) > MAX_ITEMS else []
        return [_shortened(each) for each in value[:MAX_ITEMS]] + more
    if isinstance(value, dict):
        return {name: _shortened(each) for name, each in value.items()}
    return value
