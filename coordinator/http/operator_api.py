"""The routes that are read: federations, rounds, devices, tokens, events, the audit log. Versioned under /api/v1.

Lists come in pages: `limit` items, and a Link header to the next ones. `steering_api` has the routes that change something.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from coordinator.broker.access_lists import silenced_in
from coordinator.errors import NotFoundError
from coordinator.facts.events import CursorError, EventFilter, Matches, in_words, read_page
from coordinator.http.access import Role, require
from coordinator.http.changes import ViewRoute, etag_of
from coordinator.http.problems import PROBLEMS, ProblemError
from coordinator.operations.steering import device_of, federation_of
from coordinator.operations.views import (
    ApiTokenView,
    DeviceView,
    FederationView,
    RoundView,
    TokenView,
    api_token_view,
    device_view,
    federation_view,
    round_view,
    token_view,
)
from coordinator.paths import Home
from coordinator.rounds.records import DeviceState
from coordinator.service.coordinator import Coordinator
from fedcg.learning.spec import RoundPolicy


class EventsView(BaseModel):
    """Lines of a log, oldest first.

    Attributes:
        events: their fields; events of the coordinator have the sentence of the log under `message`, and its `level`.
        older: cursor of the lines before them; None when there are none.
        newer: the value of `after` that gives the lines after them, also when there are none yet.
    """

    events: list[dict[str, Any]]
    older: str | None
    newer: str | None


class HealthView(BaseModel):
    """Whether the coordinator works."""

    status: str


def _coordinator(request: Request) -> Coordinator:
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


def _home(request: Request) -> Home:
    home: Home = request.app.state.home
    return home


def reading(role: Role) -> APIRouter:
    """Routes under /api/v1 that this role may read."""
    needed = [Depends(require(role))]
    return APIRouter(prefix="/api/v1", route_class=ViewRoute, dependencies=needed, responses=PROBLEMS, tags=["read"])


Running = Annotated[Coordinator, Depends(_coordinator)]
OfHome = Annotated[Home, Depends(_home)]
Limit = Annotated[int, Query(ge=1, le=1000, description="at most so many items")]
Cursor = Annotated[str | None, Query(max_length=400, description="where the page begins, from a Link header")]
Name = Annotated[str, Query(max_length=100)]
Level = Annotated[Literal["debug", "info", "warning", "error"], Query(description="the least level of the sentences")]
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Pages:
    """The page that a request asks for; the link to the next one goes into the answer.

    A cursor is the key of the page's last item: items that come or go between two requests shift nothing.
    """

    request: Request
    response: Response
    limit: int
    cursor: str | None

    def of(
        self, items: Sequence[ItemT], key: Callable[[ItemT], tuple[Any, ...]], *, descending: bool = False
    ) -> list[ItemT]:
        """The items of the page.

        Args:
            items: all of them.
            key: sorts them, and is different for each.
            descending: the highest key first.

        Raises:
            ProblemError: 422, not a cursor of this list.
        """
        ordered = sorted(items, key=key, reverse=descending)
        if self.cursor is not None:
            try:
                last = tuple(json.loads(base64.urlsafe_b64decode(self.cursor)))
                ordered = [item for item in ordered if (key(item) < last if descending else key(item) > last)]
            except (ValueError, TypeError, RecursionError) as error:
                raise ProblemError(422, "the cursor is not one of this list; ask without one") from error
        page = ordered[: self.limit]
        if len(ordered) > len(page):
            last_key = json.dumps(key(page[-1])).encode()
            self.link(base64.urlsafe_b64encode(last_key).decode())
        return page

    def link(self, cursor: str) -> None:
        """Link to the same request with another cursor."""
        query = self.request.query_params.multi_items()
        kept = [(name, value) for name, value in query if name not in ("cursor", "after")]
        where = f"{self.request.url.path}?{urlencode([*kept, ('cursor', cursor)])}"
        self.response.headers["Link"] = f'<{where}>; rel="next"'


def _pages(request: Request, response: Response, limit: Limit = 100, cursor: Cursor = None) -> Pages:
    return Pages(request, response, limit, cursor)


Paged = Annotated[Pages, Depends(_pages)]
health = APIRouter()
"""Needs no token."""
router, admin = reading(Role.VIEWER), reading(Role.ADMIN)


@health.head("/healthz", include_in_schema=False)
@health.get("/healthz")
async def healthz() -> HealthView:  # on no thread: it answers also when all are busy
    """Whether the process answers."""
    return HealthView(status="ok")


@health.get("/readyz")
async def readyz(running: Running, response: Response) -> HealthView:
    """Whether every federation is connected to the broker and can store artifacts; 503 when not."""
    services = running.services
    problem = next((service.store_problem for service in services.values() if service.store_problem), "")
    if problem:
        response.status_code = 503
        return HealthView(status=problem)
    cut_off = [federation for federation, service in services.items() if not service.is_connected]
    if cut_off:
        response.status_code = 503
        return HealthView(status=f"no link to the broker: {', '.join(cut_off)}")
    return HealthView(status="ok")


@router.get("/federations")
def federations(running: Running, page: Paged, archived: bool = False) -> list[FederationView]:
    """All federations, oldest first; archived ones only where they are asked for."""
    found = running.store.federations() if archived else running.store.shown_federations()
    chosen = page.of(found, lambda record: (record.created_at, record.id))
    return [federation_view(running, record) for record in chosen]


@router.get("/federations/{federation}")
def federation(federation: str, running: Running) -> FederationView:
    """One federation and where it stands."""
    return federation_view(running, federation_of(running.store, federation))


@router.get("/federations/{federation}/policy")
def policy(federation: str, running: Running, response: Response) -> RoundPolicy:
    """How its rounds go; the ETag serves the If-Match of a change."""
    found = federation_of(running.store, federation).policy
    response.headers["ETag"] = policy_tag(found)
    return found


@router.get("/federations/{federation}/rounds")
def rounds(federation: str, running: Running, page: Paged) -> list[RoundView]:
    """All rounds so far, oldest first."""
    attempts = running.store.attempts(federation_of(running.store, federation).id)
    numbers = page.of(sorted({attempt.round for attempt in attempts}), lambda number: (number,))
    return [
        round_view(running.store, number, [item for item in attempts if item.round == number]) for number in numbers
    ]


@router.get("/federations/{federation}/rounds/{number}")
def one_round(federation: str, number: int, running: Running) -> RoundView:
    """One round; 404 when it was never opened."""
    stored = running.store.attempts(federation_of(running.store, federation).id)
    attempts = [item for item in stored if item.round == number]
    if not attempts:
        raise NotFoundError(f"round {number} of {federation} was not opened yet")
    return round_view(running.store, number, attempts)


@router.get("/devices")
def devices(
    running: Running,
    home: OfHome,
    page: Paged,
    search: Name = "",
    state: DeviceState | None = None,
    online: bool | None = None,
    sort: Annotated[Literal["id", "enrolled_at", "last_seen_at"], Query()] = "id",
    descending: bool = False,
) -> list[DeviceView]:
    """All devices, also those that were revoked or left; `search` is a part of the id."""
    there = {device for service in running.services.values() for device in service.state.online}
    wanted = [
        device
        for device in running.store.devices()
        if search in device.id and state in (None, device.state) and online in (None, device.id in there)
    ]
    chosen = page.of(wanted, lambda device: (*_sortable(getattr(device, sort)), device.id), descending=descending)
    certificates, silenced = running.store.register.certificates(), silenced_in(home)
    return [device_view(running, device, certificates, silenced) for device in chosen]


@router.get("/devices/{device}")
def one_device(device: str, running: Running, home: OfHome) -> DeviceView:
    """One device with its certificates."""
    found = device_of(running.store, device)
    return device_view(running, found, running.store.register.certificates(device), silenced_in(home))


@router.get("/enrolment-tokens")
def enrolment_tokens(running: Running, page: Paged) -> list[TokenView]:
    """All enrolment tokens, oldest first; their secrets are stored nowhere."""
    chosen = page.of(running.store.register.tokens(), lambda token: (token.created_at, token.id))
    return [token_view(token) for token in chosen]


@router.get("/events")
def events(
    home: OfHome,
    page: Paged,
    event: Name = "",
    client: Name = "",
    federation: Name = "",
    text: Name = "",
    level: Level = "debug",
    after: Cursor = None,
) -> EventsView:
    """Lines of the event log with their sentences: the newest, those before `cursor`, or those `after` a cursor."""
    found = _log(home.events_file, page, after, EventFilter(event, client, federation, text, level).fits)
    return found.model_copy(update={"events": [in_words(line) for line in found.events]})


@admin.get("/audit")
def audit(home: OfHome, page: Paged, identity: Name = "", after: Cursor = None) -> EventsView:
    """Lines of the audit log: who changed what, and the outcome."""
    return _log(home.audit_file, page, after, lambda line: identity in ("", line.get("identity")))


@admin.get("/api-tokens")
def api_tokens(running: Running, page: Paged) -> list[ApiTokenView]:
    """All tokens of this API, oldest first; their secrets are stored nowhere."""
    chosen = page.of(running.store.api.tokens(), lambda token: (token.created_at, token.id))
    return [api_token_view(token) for token in chosen]


def policy_tag(policy: RoundPolicy) -> str:
    """The ETag of a policy."""
    return etag_of(policy.model_dump_json().encode())


def _sortable(value: str | float | None) -> tuple[bool, str | float]:
    """A value to sort by; those that lack it come last."""
    return (value is None, 0.0 if value is None else value)


def _log(path: Path, page: Pages, after: str | None, matches: Matches) -> EventsView:
    try:
        read = read_page(path, page.limit, matches, before=page.cursor, after=after)
    except CursorError as error:
        raise ProblemError(422, str(error)) from error
    if read.older is not None:
        page.link(read.older)
    return EventsView(events=read.events, older=read.older, newer=read.newer)
