"""Streams the event log as Server-Sent Events."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event
from sqlalchemy.exc import SQLAlchemyError

from coordinator.http.access import Identity, Role, access_of, require
from coordinator.http.refusals import ProblemError
from coordinator.storage.event_store import Events

LOOK_EVERY_S = 0.5
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
RECHECK_S = 15.0
"""Interval at which a stream's token or session is checked again. The stream ends with them."""
MAX_WATCHERS = 500
"""Open event streams; each one looks for new events twice a second."""
AT_ONCE = 1000
"""Events read at once."""
MAX_OF_TOKEN = 50
"""Open event streams of one token and its sessions."""

Reader = Annotated[Identity, Depends(require(Role.VIEWER))]
router = APIRouter(tags=["read"])


class EventStream:
    """The events as Server-Sent Events. Readers at the same position share the same bytes, which are formatted once.

    Args:
        events: the events in the database.

    Attributes:
        watchers: number of present readers, by the id of their token.
    """

    def __init__(self, events: Events) -> None:
        self._events = events
        self._last: tuple[int, bytes, int] | None = None
        self.watchers: Counter[str] = Counter()

    def after(self, number: int) -> tuple[bytes, int]:
        """The events after the one with this id (empty if none), and the id of the last one."""
        if number >= self._events.newest():
            return b"", number
        if self._last is None or self._last[0] != number:
            found = self._events.after(number, AT_ONCE)
            lines = (format_sse_event(data_str=json.dumps(each), event="log", id=str(each["id"])) for each in found)
            self._last = (number, b"".join(lines), found[-1]["id"] if found else self._events.newest())
        return self._last[1:]

    async def follow(
        self, last_event_id: str, token: str, is_valid: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """Yield the events after the one with this id, or from now on, while the reader is connected and its credentials are valid."""
        await asyncio.to_thread(self._events.flush)
        newest = await asyncio.to_thread(self._events.newest)
        is_known = last_event_id.isascii() and last_event_id.isdigit() and int(last_event_id) <= newest
        number = int(last_event_id) if is_known else newest
        self.watchers[token] += 1
        sent_at = checked_at = time.monotonic()
        try:
            yield format_sse_event(comment="events from here on", id=str(number), retry=RETRY_MS)
            while True:
                if time.monotonic() - checked_at >= RECHECK_S:
                    if not await is_valid():
                        return
                    checked_at = time.monotonic()
                text, number = await asyncio.to_thread(self.after, number)
                if not text and time.monotonic() - sent_at >= KEEP_ALIVE_S:
                    text = KEEPALIVE_COMMENT
                if text:
                    yield text
                    sent_at = time.monotonic()
                if number >= self._events.newest():  # all readers wake at once, so that they share a position
                    await asyncio.sleep(LOOK_EVERY_S - time.monotonic() % LOOK_EVERY_S)
        except SQLAlchemyError:  # the browser reconnects, and the coordinator's log has the reason
            return
        finally:
            self.watchers -= Counter({token: 1})  # also removes entries of 0


@router.get("/api/v1/events/stream", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def event_stream(
    request: Request, identity: Reader, last_event_id: Annotated[str, Header(max_length=64)] = ""
) -> Response:
    """New events from now on, or all after `Last-Event-ID`, each with its id."""
    stream: EventStream = request.app.state.events
    own = stream.watchers[identity.token_id]
    if stream.watchers.total() >= MAX_WATCHERS or own >= MAX_OF_TOKEN:
        raise ProblemError(
            503,
            f"{stream.watchers.total()} event streams are open, {own} of them with this token; close one first",
            headers={"Retry-After": "10"},
        )

    async def is_valid() -> bool:
        return await access_of(request).known(request) is not None

    return EventSourceResponse(stream.follow(last_event_id, identity.token_id, is_valid))
