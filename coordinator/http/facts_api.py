"""Facts over HTTP: where a federation stands, open problems, the metrics, and the event log as Server-Sent Events."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.responses import JSONResponse
from fastapi.sse import KEEPALIVE_COMMENT, EventSourceResponse, format_sse_event

from coordinator.facts.current_round import CurrentRound, current_round
from coordinator.facts.events import ON_BYTES, in_words, read_on, start_of
from coordinator.facts.known import Known, known_of
from coordinator.facts.metrics import CONTENT_TYPE, metrics_text
from coordinator.facts.problems import Problem, open_problems
from coordinator.http.access import Identity, Role, access_of, require
from coordinator.http.problems import ProblemError

LOOK_EVERY_S = 0.5
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
RECHECK_S = 15.0
"""Interval at which a stream's token or session is checked again: it ends with them."""
MAX_WATCHERS = 500
"""Open event streams; each one looks at the size of the event log twice a second."""
MAX_OF_TOKEN = 50
"""Of them with one token, or with the sessions that it opened."""

_reading = require(Role.VIEWER)
Reader = Annotated[Identity, Depends(_reading)]
router = APIRouter(dependencies=[Depends(_reading)])


def _known(request: Request) -> Known:
    return known_of(request.app.state.coordinator, request.app.state.home.root)


Now = Annotated[Known, Depends(_known)]


@router.get("/api/v1/federations/{federation}/now")
def federation_now(federation: str, known: Now) -> CurrentRound:
    """The open round: quorum, deadline, the phase of every client, and when it will probably end."""
    return current_round(known, federation)


@router.get("/api/v1/problems")
def problems(known: Now) -> list[Problem]:
    """Open problems, each with its remedy; severe ones first."""
    return open_problems(known)


@router.get("/metrics")
def metrics(known: Now) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(metrics_text(known), media_type=CONTENT_TYPE)


class EventStream:
    """The event log as Server-Sent Events. Readers at one place of the log get the same bytes, which are made once.

    Args:
        path: of the log.

    Attributes:
        watchers: readers there are now, by the id of their token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: tuple[str, bytes, str] | None = None
        self.watchers: Counter[str] = Counter()

    def after(self, cursor: str) -> tuple[bytes, str]:
        """The events after a cursor with their sentences, empty where there are none, and where to go on."""
        if self._last is None or self._last[0] != cursor:
            page = read_on(self._path, cursor)
            if page.newer in (None, cursor):
                return b"", cursor
            events = (
                format_sse_event(data_str=json.dumps(in_words(event)), event="log", id=at) for at, event in page.lines
            )
            self._last = (cursor, b"".join(events), page.newer or cursor)
        return self._last[1:]

    async def follow(
        self, last_event_id: str, token: str, is_valid: Callable[[], Awaitable[bool]]
    ) -> AsyncIterator[bytes]:
        """The events after the one with this id, or from now on, as they come, while the reader stays and is still known."""
        cursor = start_of(self._path, last_event_id)
        self.watchers[token] += 1
        sent_at = checked_at = time.monotonic()
        try:
            yield format_sse_event(comment="events from here on", id=cursor or None, retry=RETRY_MS)
            while True:
                if time.monotonic() - checked_at >= RECHECK_S:
                    if not await is_valid():
                        return
                    checked_at = time.monotonic()
                text, cursor = self.after(cursor)
                if not text and time.monotonic() - sent_at >= KEEP_ALIVE_S:
                    text = KEEPALIVE_COMMENT
                if text:
                    yield text
                    sent_at = time.monotonic()
                if len(text) < ON_BYTES:  # all readers at one moment, so that they are at one place
                    await asyncio.sleep(LOOK_EVERY_S - time.monotonic() % LOOK_EVERY_S)
        finally:
            self.watchers -= Counter({token: 1})  # and no entry where none is left


@router.get("/api/v1/events/stream", response_class=Response, responses={200: {"content": {"text/event-stream": {}}}})
async def event_stream(
    request: Request, identity: Reader, last_event_id: Annotated[str, Header(max_length=64)] = ""
) -> Response:
    """The event log from now on, or from `Last-Event-ID` on: each event as it is written, with its position as id."""
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


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The routes with their schemas."""
    return JSONResponse(request.app.openapi())
