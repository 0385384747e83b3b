"""Facts over HTTP: where a federation stands, open problems, the metrics, and the event log as Server-Sent Events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.sse import EventSourceResponse, ServerSentEvent

from coordinator.facts.current_round import CurrentRound, current_round
from coordinator.facts.events import EventFeed, Position
from coordinator.facts.known import Known, known_of
from coordinator.facts.metrics import CONTENT_TYPE, metrics_text
from coordinator.facts.problems import Problem, open_problems
from coordinator.http.access import Role, require
from coordinator.http.problems import ProblemError

LOOK_EVERY_S = 0.5
MAX_WATCHERS = 500
"""Open event streams; each one looks at the size of the event log twice a second."""

router = APIRouter(dependencies=[Depends(require(Role.VIEWER))])


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


def _watching(request: Request) -> None:
    if getattr(request.app.state, "watchers", 0) >= MAX_WATCHERS:
        raise ProblemError(
            503, f"{MAX_WATCHERS} event streams are open; close one first", headers={"Retry-After": "10"}
        )


@router.get("/api/v1/events/stream", response_class=EventSourceResponse, dependencies=[Depends(_watching)])
async def event_stream(
    request: Request, known: Now, last_event_id: Annotated[str, Header(max_length=64)] = ""
) -> AsyncIterable[ServerSentEvent]:
    """The event log from now on, or from `Last-Event-ID` on: each event as it is written, with its position as id."""
    feed, state = EventFeed(known.events_file), request.app.state
    position = Position.parse(last_event_id) or feed.end()
    state.watchers = getattr(state, "watchers", 0) + 1
    try:
        yield ServerSentEvent(comment="events from here on", id=str(position), retry=2000)
        while True:
            found, position = feed.read(position)
            for at, event in found:
                yield ServerSentEvent(data=event, event="log", id=str(at))
            await asyncio.sleep(0.0 if found else LOOK_EVERY_S)
    finally:
        state.watchers -= 1
