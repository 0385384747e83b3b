"""The routes that are read: the facts as JSON, the metrics, the event log and the audit log. `steering_api` has those that change something."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from coordinator.errors import NotFoundError
from coordinator.facts.current_round import CurrentRound, current_round
from coordinator.facts.devices import DeviceFacts, device_facts, in_order, one_device
from coordinator.facts.federations import FederationFacts, RoundFacts, attempts_by_round, federation_facts, round_facts
from coordinator.facts.known import Known, known_of
from coordinator.facts.metrics import CONTENT_TYPE, metrics_text
from coordinator.facts.problems import Problem, open_problems
from coordinator.facts.tokens import ApiTokenFacts, TokenFacts, api_token_facts, token_facts
from coordinator.http.access import Role, require
from coordinator.http.changes import Changes
from coordinator.http.problems import PROBLEMS
from coordinator.rounds.records import DeviceState
from coordinator.storage.event_store import EventFilter
from fedcg.learning.spec import RoundPolicy

MAX_ITEMS = 1000
"""Of one answer."""
MAX_ID = 2**53
LEFT_OUT = "X-Left-Out"
"""The header of a list that has more items than its answer: how many more."""


class Lines(BaseModel):
    """Events, or lines of the audit log, oldest first; `older` is the value of `before` for those before them, None where these are all.

    An event has `id`, its fields, the sentence of the log under `message`, and its `level`.
    """

    events: list[dict[str, Any]]
    older: int | float | None


class Health(BaseModel):
    """Whether the coordinator works."""

    status: str


def known_from(request: Request) -> Known:
    """What the coordinator of the application that serves a request knows now."""
    return known_of(request.app.state.coordinator, request.app.state.home.root)


def reading(role: Role) -> APIRouter:
    """Routes under /api/v1 that this role may read."""
    return APIRouter(prefix="/api/v1", dependencies=[Depends(require(role))], responses=PROBLEMS, tags=["read"])


Now = Annotated[Known, Depends(known_from)]
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="at most so many items")]
Name = Annotated[str, Query(max_length=100)]
Level = Annotated[Literal["debug", "info", "warning", "error"], Query(description="the least level of the sentences")]
ItemT = TypeVar("ItemT")

health = APIRouter()
"""Needs no token."""
plain = APIRouter(dependencies=[Depends(require(Role.VIEWER))])
router, admin = reading(Role.VIEWER), reading(Role.ADMIN)


@health.head("/healthz", include_in_schema=False)
@health.get("/healthz")
async def healthz() -> Health:  # on no thread: it answers also when all are busy
    """Whether the process answers."""
    return Health(status="ok")


@health.get("/readyz")
async def readyz(known: Now, response: Response) -> Health:
    """Whether every federation is connected to the broker and can store artifacts; 503 when not."""
    problem = next((service.store_problem for service in known.services.values() if service.store_problem), "")
    cut_off = [federation for federation, service in known.services.items() if not service.is_connected]
    if cut_off and not problem:
        problem = f"no link to the broker: {', '.join(cut_off)}"
    if problem:
        response.status_code = 503
    return Health(status=problem or "ok")


@plain.get("/metrics")
def metrics(known: Now) -> Response:
    """Metrics in the text format of Prometheus."""
    return Response(metrics_text(known), media_type=CONTENT_TYPE)


@plain.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The routes with their schemas."""
    return JSONResponse(request.app.openapi())


@router.get("/federations")
def federations(
    known: Now, response: Response, limit: Limit = MAX_ITEMS, archived: bool = False
) -> list[FederationFacts]:
    """All federations, oldest first; archived ones only where they are asked for."""
    found = known.store.federations() if archived else known.store.shown_federations()
    oldest_first = sorted(found, key=lambda record: (record.created_at, record.id))
    return [federation_facts(known, record) for record in _bounded(response, oldest_first, limit)]


@router.get("/federations/{federation}")
def federation(federation: str, known: Now) -> FederationFacts:
    """One federation and where it stands."""
    return federation_facts(known, known.federation(federation))


@router.get("/federations/{federation}/now")
def federation_now(federation: str, known: Now) -> CurrentRound:
    """The open round: quorum, deadline, the phase of every client, and when it will probably end."""
    return current_round(known, federation)


@router.get("/federations/{federation}/policy")
def policy(federation: str, known: Now, response: Response) -> RoundPolicy:
    """How its rounds go; the ETag serves the If-Match of a change."""
    found = known.federation(federation).policy
    response.headers["ETag"] = policy_tag(found)
    return found


@router.get("/federations/{federation}/rounds")
def rounds(
    federation: str, known: Now, response: Response, limit: Limit = 100, after: Annotated[int, Query(ge=0)] = 0
) -> list[RoundFacts]:
    """The rounds after one, oldest first."""
    found = attempts_by_round(known, federation)
    numbers = _bounded(response, sorted(number for number in found if number > after), limit)
    return [round_facts(known, found[number]) for number in numbers]


@router.get("/federations/{federation}/rounds/{number}")
def one_round(federation: str, number: int, known: Now) -> RoundFacts:
    """One round; 404 when it was never opened."""
    attempts = attempts_by_round(known, federation).get(number)
    if attempts is None:
        raise NotFoundError(f"round {number} of {federation} was not opened yet")
    return round_facts(known, attempts)


@router.get("/devices")
def devices(
    known: Now,
    response: Response,
    limit: Limit = MAX_ITEMS,
    search: Name = "",
    state: DeviceState | None = None,
    online: bool | None = None,
    sort: Literal["id", "enrolled_at", "last_seen_at"] = "id",
    descending: bool = False,
) -> list[DeviceFacts]:
    """All devices, also those that were revoked or left; `search` is a part of the id."""
    wanted = [
        device
        for device in device_facts(known)
        if search in device.id and state in (None, device.state) and online in (None, bool(device.online))
    ]
    return _bounded(response, in_order(wanted, sort, descending=descending), limit)


@router.get("/devices/{device}")
def device(device: str, known: Now) -> DeviceFacts:
    """One device with its certificates."""
    return one_device(known, device)


@router.get("/enrolment-tokens")
def enrolment_tokens(known: Now, response: Response, limit: Limit = MAX_ITEMS) -> list[TokenFacts]:
    """All enrolment tokens, newest first; their secrets are stored nowhere."""
    chosen = _bounded(response, known.store.register.tokens()[::-1], limit)
    return [token_facts(token, known.now) for token in chosen]


@router.get("/problems")
def problems(known: Now) -> list[Problem]:
    """Open problems, each with its remedy; severe ones first."""
    return open_problems(known)


@router.get("/events")
def events(
    known: Now,
    limit: Limit = 100,
    event: Name = "",
    client: Name = "",
    federation: Name = "",
    text: Name = "",
    level: Level = "debug",
    before: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
) -> Lines:
    """The last events that fit, or those before the one with the id `before`."""
    found = known.store.events.last(EventFilter(event, client, federation, text, level), limit, before)
    return Lines(events=found[::-1], older=found[-1]["id"] if len(found) == limit else None)


@admin.get("/audit")
def audit(
    request: Request,
    limit: Limit = 100,
    identity: Name = "",
    before: Annotated[float | None, Query(ge=0, le=MAX_ID)] = None,
) -> Lines:
    """The last lines of the audit log, or those before a time `t`: who changed what, and the outcome."""
    changes: Changes = request.app.state.changes
    found = changes.audit.last(limit, identity, before)
    return Lines(events=found[::-1], older=found[-1]["t"] if len(found) == limit else None)


@admin.get("/api-tokens")
def api_tokens(known: Now, response: Response, limit: Limit = MAX_ITEMS) -> list[ApiTokenFacts]:
    """All tokens of this API, oldest first; their secrets are stored nowhere."""
    chosen = _bounded(response, known.store.api.tokens(), limit)
    return [api_token_facts(token, known.now) for token in chosen]


def policy_tag(policy: RoundPolicy) -> str:
    """The ETag of a policy: two people who edit it at once are noticed by it."""
    return f'"{hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:32]}"'


def _bounded(response: Response, items: Sequence[ItemT], limit: int) -> list[ItemT]:
    """The first items; a header of the answer has the number of those that are left out."""
    if len(items) > limit:
        response.headers[LEFT_OUT] = str(len(items) - limit)
    return list(items[:limit])
