"""The routes of the operators' API: read facts as JSON, metrics and logs; change federations, devices and tokens.

The work is done in `facts` and `operations`.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import anyio.to_thread
import tomllib
from fastapi import APIRouter, Body, Depends, Header, Query, Request, Response
from fastapi import Path as PathParameter
from fastapi.responses import FileResponse, JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel, Field, Json

from coordinator.errors import NotFoundError
from coordinator.facts.audits import DeviceAudits, device_audits
from coordinator.facts.comparison import ComparedFigure, compared
from coordinator.facts.devices import DeviceFacts, DeviceFilter, Standing, device_facts, in_order, one_device
from coordinator.facts.enrolment import EnrolmentFacts, enrolments
from coordinator.facts.federations import (
    CurrentRound,
    FederationFacts,
    RoundFacts,
    attempts_by_round,
    current_round,
    federation_facts,
    round_facts,
)
from coordinator.facts.known import Known, known_of
from coordinator.facts.metrics import CONTENT_TYPE, metrics_text
from coordinator.facts.models import ModelVersion, Worth, model_versions, worth
from coordinator.facts.overview import FederationSummary, Found, search, summaries
from coordinator.facts.policy import PolicyChange, plan_like, policy_changes
from coordinator.facts.problems import Problem, open_problems
from coordinator.facts.sent import Sent, sent
from coordinator.facts.timeline import RoundTimeline, round_timeline
from coordinator.http.access import Role, Session, access_of, require
from coordinator.http.changes import ChangeRoute, Changes, in_turn
from coordinator.http.refusals import PROBLEMS, ProblemError
from coordinator.members.api_tokens import DAYS, MAX_DAYS, ApiTokenFacts, api_token_facts
from coordinator.members.enrolment import TokenFacts, WantedToken, enrol_line, token_facts
from coordinator.members.membership import Revoked
from coordinator.notifications import ChannelFacts, Notifier
from coordinator.operations.create_federation import NetworkSize, OperatorPlan, example_plan, network_sizes
from coordinator.operations.operations import MAX_PIN, MAX_REASON, Description, Operations, version_of
from coordinator.rounds.records import DeviceState, FederationRecord, TokenRecord
from coordinator.storage.event_store import EventFilter
from fedcg.config_file import Settings
from fedcg.learning.spec import FederationPlan, RoundPolicy
from fedcg.wire.messages.enrolment_messages import Token

MAX_ITEMS = 1000
"""Maximum number of items in an answer."""
MAX_ID = 2**53
LEFT_OUT = "X-Left-Out"
"""Header with the number of items that an answer omits."""


class Lines(BaseModel):
    """Events, or lines of the audit log, oldest first. For older ones, pass `older` as `before`; None if there are no more.

    An event has `id`, its fields, the log sentence as `message`, and its `level`.
    """

    events: list[dict[str, Any]]
    older: int | float | None


class Health(BaseModel):
    """Whether the coordinator works."""

    status: str


def known_from(request: Request) -> Known:
    """The source of facts of the application that serves a request, now."""
    return known_of(request.app.state.coordinator, request.app.state.home.root)


def routes(role: Role, tag: str, kind: type[APIRoute] = APIRoute) -> APIRouter:
    """A router for routes under /api/v1 that this role may use: to read, or with the kind `ChangeRoute` to make changes."""
    needed = [Depends(require(role))]
    return APIRouter(prefix="/api/v1", route_class=kind, dependencies=needed, responses=PROBLEMS, tags=[tag])


Now = Annotated[Known, Depends(known_from)]
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS, description="maximum number of items")]
Name = Annotated[str, Query(max_length=100)]
Moment = Annotated[float | None, Query(ge=0, le=MAX_ID)]
Level = Annotated[Literal["debug", "info", "warning", "error"], Query(description="minimum level")]
OfRound = Annotated[int | None, Query(alias="round", ge=1, le=MAX_ID)]
OfAttempt = Annotated[int | None, Query(ge=1, le=MAX_ID)]
OfVersion = Annotated[int, PathParameter(ge=0, le=MAX_ID)]
JsonPlan = Annotated[Json[FederationPlan], Query(description="a plan, as JSON")]
ItemT = TypeVar("ItemT")

health = APIRouter()
"""Routes without a token."""
plain = APIRouter(dependencies=[Depends(require(Role.VIEWER))])
router, operating, admin = routes(Role.VIEWER, "read"), routes(Role.OPERATOR, "read"), routes(Role.ADMIN, "read")


@health.head("/healthz", include_in_schema=False)
@health.get("/healthz")
async def healthz() -> Health:  # needs no thread, so it answers even if all are busy
    """Check that the process answers."""
    return Health(status="ok")


@health.get("/readyz")
async def readyz(known: Now, response: Response) -> Health:
    """Check that every federation is connected to the broker and can store artifacts; 503 if not."""
    problem = next((service.store_problem for service in known.services.values() if service.store_problem), "")
    cut_off = [federation for federation, service in known.services.items() if not service.is_connected]
    if cut_off and not problem:
        problem = f"no connection to the broker: {', '.join(cut_off)}"
    if problem:
        response.status_code = 503
    return Health(status=problem or "ok")


@plain.get("/metrics")
def metrics(known: Now) -> Response:
    """Metrics in the Prometheus text format."""
    return Response(metrics_text(known), media_type=CONTENT_TYPE)


@plain.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """The routes with their schemas."""
    return JSONResponse(request.app.openapi())


@router.get("/overview")
def overview(known: Now, archived: bool = False) -> list[FederationSummary]:
    """All federations in short, newest first: round, accuracies, devices online, open problems, next end. With `archived`, the archived ones."""
    return summaries(known, archived)


@router.get("/search")
def search_all(known: Now, q: Name) -> list[Found]:
    """Federations, devices, rounds and exported models that match `q`, at most 50 of each.

    `q` is part of an id, label, site, note or remark, a number of a round or version, or the first characters of a sha256.
    """
    return search(known, q)


@router.get("/federations")
def federations(
    known: Now, response: Response, limit: Limit = MAX_ITEMS, archived: bool = False
) -> list[FederationFacts]:
    """All federations, oldest first. Archived ones are included only with `archived`."""
    found = known.store.federations() if archived else known.store.shown_federations()
    oldest_first = sorted(found, key=lambda record: (record.created_at, record.id))
    return [federation_facts(known, record) for record in _bounded(response, oldest_first, limit)]


@router.get("/federations/{federation}")
def federation(federation: str, known: Now) -> FederationFacts:
    """One federation and its state."""
    return federation_facts(known, known.federation(federation))


@router.get("/federations/{federation}/now")
def federation_now(federation: str, known: Now) -> CurrentRound:
    """The open round: quorum, deadline, phase of every client, and estimated end."""
    return current_round(known, federation)


@router.get("/federations/{federation}/policy")
def policy(federation: str, known: Now, response: Response) -> RoundPolicy:
    """The policy of a federation. Use the ETag in If-Match to change it."""
    found = known.federation(federation).policy
    response.headers["ETag"] = policy_tag(found)
    return found


@router.get("/federations/{federation}/policy/changes")
def changes_of_policy(federation: str, known: Now) -> list[PolicyChange]:
    """The last changes of the policy, newest first: who changed which field from which value."""
    return policy_changes(known, federation)


@router.get("/federations/{federation}/plan", response_model_exclude_defaults=True)
def plan(federation: str, known: Now) -> FederationPlan:
    """A plan for another federation like this one, under the next free name; without fields that have their defaults."""
    return plan_like(known, federation)


@router.get("/federations/{federation}/rounds")
def rounds(
    federation: str, known: Now, response: Response, limit: Limit = 100, after: Annotated[int, Query(ge=0)] = 0
) -> list[RoundFacts]:
    """The rounds after round `after`, oldest first."""
    found = attempts_by_round(known, federation)
    numbers = _bounded(response, sorted(number for number in found if number > after), limit)
    return [round_facts(known, found[number]) for number in numbers]


@router.get("/federations/{federation}/rounds/{number}")
def one_round(federation: str, number: int, known: Now) -> RoundFacts:
    """One round; 404 if it was never opened."""
    attempts = attempts_by_round(known, federation).get(number)
    if attempts is None:
        raise NotFoundError(f"round {number} of {federation} has not been opened yet")
    return round_facts(known, attempts)


@router.get("/federations/{federation}/timeline")
def timeline(federation: str, known: Now, number: OfRound = None, attempt: OfAttempt = None) -> RoundTimeline | None:
    """The stages of every client in one attempt, by default the last one; null before the first attempt."""
    return round_timeline(known, federation, number, attempt)


@router.get("/federations/{federation}/worth")
def federation_worth(federation: str, known: Now) -> Worth:
    """The benefit for each client: accuracy against its local-only model, the gain of its last rounds with its interval, and what it cost."""
    return worth(known, federation)


@router.get("/federations/{federation}/models")
def federation_models(federation: str, known: Now) -> list[ModelVersion]:
    """The versions of the shared model, newest first."""
    return model_versions(known, federation)


@router.get("/federations/{federation}/compare")
def compare(federation: str, known: Now, request: Request, first: Name, second: Name) -> list[ComparedFigure]:
    """Two versions (numbers of their rounds) or two devices side by side."""
    return compared(known, federation, first, second, request.app.state.coordinator.artifacts.get)


@operating.get("/federations/{federation}/models/{number}/artifact", response_class=FileResponse)
def download_model(federation: str, number: OfVersion, known: Now, request: Request) -> FileResponse:
    """The bytes of a version, as devices download them. Its manifest is the header of the artifact."""
    record = version_of(known.store, federation, number)
    try:
        file = request.app.state.coordinator.artifacts.local(record.artifact)
    except FileNotFoundError as error:
        raise NotFoundError(f"the version of round {number} is deleted; pin versions to keep them") from error
    return FileResponse(file, media_type="application/octet-stream", filename=f"{federation}-round-{number}.fedcg")


@router.get("/federations/{federation}/sent")
def what_left(federation: str, known: Now, device: Name | None = None) -> Sent:
    """What left the devices, with the last update of each; with `device` all updates of this one, and the rounds of each report field."""
    return sent(known, federation, device is not None, device)


@router.get("/federations/{federation}/audits")
def audits(federation: str, known: Now) -> list[DeviceAudits]:
    """Audits of updates on devices: the rounds sent with figures, the rounds withheld, and the last figures."""
    return device_audits(known, federation)


@router.get("/devices")
def devices(
    known: Now,
    response: Response,
    limit: Limit = MAX_ITEMS,
    search: Name = "",
    state: DeviceState | None = None,
    standing: Standing | None = None,
    online: bool | None = None,
    label: Name = "",
    site: Name = "",
    version: Name = "",
    federation: Name = "",
    sort: Literal["id", "enrolled_at", "last_seen_at"] = "id",
    descending: bool = False,
) -> list[DeviceFacts]:
    """All devices, including those that were revoked or left. `search` matches part of the id, version, site, note, hardware, a label or a remark."""
    matching = DeviceFilter(search, standing or "", label, site, version, federation).of(device_facts(known))
    wanted = [device for device in matching if state in (None, device.state) and online in (None, bool(device.online))]
    return _bounded(response, in_order(wanted, sort, descending=descending), limit)


@router.get("/devices/{device}")
def device(device: str, known: Now) -> DeviceFacts:
    """One device with its certificates."""
    return one_device(known, device)


@router.get("/enrolment-tokens")
def enrolment_tokens(known: Now, response: Response, limit: Limit = MAX_ITEMS) -> list[EnrolmentFacts]:
    """All enrolment tokens, newest first, with the steps that their devices have reached. Their secrets are not stored."""
    return _bounded(response, enrolments(known), limit)


@router.get("/problems")
def problems(known: Now) -> list[Problem]:
    """Open problems with their remedies, severe ones first."""
    return open_problems(known)


@router.get("/notifications")
def notifications(request: Request) -> list[ChannelFacts]:
    """The channels of [notify] in coordinator.toml, with the last outcome of each."""
    notifier: Notifier = request.app.state.notifier
    return notifier.facts()


@router.get("/sessions")
def sessions(request: Request, response: Response, limit: Limit = MAX_ITEMS) -> list[Session]:
    """Open sessions of the page, newest first: all for an admin, else your own."""
    return _bounded(response, access_of(request).list_sessions(request.state.identity), limit)


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
    since: Moment = None,
    until: Moment = None,
) -> Lines:
    """The last matching events, or those before the event with the id `before`; `since` and `until` are unix times."""
    found = known.store.events.last(EventFilter(event, client, federation, text, level, since, until), limit, before)
    return Lines(events=found[::-1], older=found[-1]["id"] if len(found) == limit else None)


@admin.get("/audit")
def audit(
    request: Request,
    limit: Limit = 100,
    identity: Name = "",
    before: Annotated[float | None, Query(ge=0, le=MAX_ID)] = None,
) -> Lines:
    """The last lines of the audit log, or those before the time `before`: changes with their author and outcome."""
    changes: Changes = request.app.state.changes
    found = changes.audit.last(limit, identity, before)
    return Lines(events=found[::-1], older=found[-1]["t"] if len(found) == limit else None)


@admin.get("/api-tokens")
def api_tokens(known: Now, response: Response, limit: Limit = MAX_ITEMS) -> list[ApiTokenFacts]:
    """All API tokens, oldest first. Their secrets are not stored."""
    chosen = _bounded(response, known.store.api.tokens(), limit)
    return [api_token_facts(token, known.now) for token in chosen]


def policy_tag(policy: RoundPolicy) -> str:
    """The ETag of a policy; it detects concurrent changes."""
    return f'"{hashlib.sha256(policy.model_dump_json().encode()).hexdigest()[:32]}"'


def unchanged(federation: str, tag: str | None) -> Callable[[RoundPolicy], None]:
    """A check that a policy still has this ETag; it raises ProblemError 412 if not."""

    def check(policy: RoundPolicy) -> None:
        if tag is not None and tag.strip() not in ("*", policy_tag(policy)):
            raise ProblemError(412, f"the policy of {federation} has changed since you read it; read it again")

    return check


def _bounded(response: Response, items: Sequence[ItemT], limit: int) -> list[ItemT]:
    """The first items; a header of the answer has the number of omitted ones."""
    if len(items) > limit:
        response.headers[LEFT_OUT] = str(len(items) - limit)
    return list(items[:limit])


class _Content(Settings, allow_inf_nan=False):
    """The content of a request: JSON without infinite numbers."""


class NewFederation(_Content):
    """A federation to create.

    Attributes:
        plan: the plan; docs/reference/plan.md describes it.
        start: whether to start it; otherwise start it later with `start`.
        continued_from: federation whose aggregate provides the initial weights: ID for its last one, or ID@ROUND.
    """

    plan: Annotated[OperatorPlan, Field(examples=[tomllib.loads(example_plan())])]
    start: bool = True
    continued_from: Annotated[str, Field(max_length=80)] | None = None


class Reason(_Content):
    """The reason for a change; the log and the page show it."""

    reason: Annotated[str, Field(max_length=MAX_REASON, examples=["the line is being rebuilt"])] = ""


class MoreRounds(_Content):
    """The number of rounds to add."""

    rounds: Annotated[int, Field(ge=1, le=100_000, examples=[10])]


class Pin(_Content):
    """The label of a version that is kept."""

    label: Annotated[str, Field(min_length=1, max_length=MAX_PIN, examples=["best"])]


class Forgotten(_Content):
    """The devices to forget."""

    devices: Annotated[list[Annotated[str, Field(max_length=63)]], Field(min_length=1, max_length=1000)]


class NewApiToken(_Content):
    """An API token to create; it expires after `days`."""

    name: Annotated[str, Field(min_length=1, max_length=64, examples=["ann"])]
    role: Role
    days: Annotated[float, Field(gt=0, le=MAX_DAYS)] = DAYS


class MadeToken(TokenFacts, frozen=True):
    """A new enrolment token. `token` is shown only now; the device enrols at `url`, e.g. with the shell command `line`."""

    token: str
    url: str | None
    line: str


def made_token(token: Token, record: TokenRecord, data: str = "") -> MadeToken:
    """A new token for its operator; `data` is the folder with the device's images."""
    line = enrol_line(token, record.federation, data)
    return MadeToken(token=token.text, url=token.url, line=line, **token_facts(record, time.time()).model_dump())


class MadeApiToken(ApiTokenFacts, frozen=True):
    """A new API token. `token` is shown only now."""

    token: str


def operations_of(request: Request) -> Operations:
    """The operations of the application that serves a request, made by its identity."""
    operations: Operations = request.app.state.operations
    return replace(operations, by=request.state.identity.name)


Doing = Annotated[Operations, Depends(operations_of)]
NO_REASON = Reason()
own, steering = routes(Role.VIEWER, "change", ChangeRoute), routes(Role.OPERATOR, "change", ChangeRoute)
steering_admin = routes(Role.ADMIN, "change", ChangeRoute)


@steering.post("/federations", status_code=201)
async def create_federation(
    wanted: NewFederation, doing: Doing, request: Request, response: Response
) -> FederationFacts:
    """Create a federation. It takes a few seconds; concurrent requests wait for each other."""
    create = partial(doing.create_federation, wanted.plan, start=wanted.start, continued_from=wanted.continued_from)
    record = await in_turn(request, create)
    response.headers["Location"] = f"/api/v1/federations/{record.id}"
    return await anyio.to_thread.run_sync(_federation, request, record)


@steering.get("/networks")
async def networks(plan: JsonPlan, request: Request, doing: Doing) -> list[NetworkSize]:
    """The networks of this machine for a plan (JSON): parameters, and bytes of an update before compression. It takes seconds."""
    return await in_turn(request, partial(network_sizes, plan.model_dump_json(), doing.stopping), "sizing")


@steering.post("/federations/{federation}/start")
def start(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Start a federation that was created without starting it."""
    return _federation(request, doing.start(federation))


@steering.post("/federations/{federation}/pause")
def pause(federation: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> FederationFacts:
    """Pause a federation. The open attempt finishes normally; no further one opens."""
    return _federation(request, doing.pause(federation, why.reason))


@steering.post("/federations/{federation}/resume")
def resume(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Resume a federation that an operator paused or that stalled, or open the next attempt after a failed one without a delay."""
    return _federation(request, doing.resume(federation))


@steering.post("/federations/{federation}/stop")
def stop(federation: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> FederationFacts:
    """Stop a federation now. Its devices keep the last aggregate."""
    return _federation(request, doing.stop(federation, why.reason))


@steering.post("/federations/{federation}/extend")
def extend(federation: str, more: MoreRounds, doing: Doing, request: Request) -> FederationFacts:
    """Add rounds to a federation, also to one that has ended or was stopped."""
    return _federation(request, doing.extend(federation, more.rounds))


@steering.post("/federations/{federation}/forget")
def forget(federation: str, who: Forgotten, doing: Doing, request: Request) -> FederationFacts:
    """Permanently exclude devices and recompute the model without them. Only for exact methods. This can't be undone."""
    return _federation(request, doing.forget(federation, who.devices))


@steering.post("/federations/{federation}/archive")
def archive(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Hide a federation that has ended or was never started. Its data is kept; `extend` reopens it."""
    return _federation(request, doing.archive(federation))


@steering.patch("/federations/{federation}/policy")
def change_policy(
    federation: str,
    changes: Annotated[
        dict[str, object],  # the policy checks them and reports all errors
        Body(examples=[{"min_clients": 4, "deadline_s": 1800}], max_length=64),
    ],
    doing: Doing,
    response: Response,
    if_match: Annotated[str | None, Header()] = None,
) -> RoundPolicy:
    """Change fields of the policy. With If-Match, only if the policy has not changed since it was read."""
    policy = doing.change_policy(federation, changes, unchanged(federation, if_match)).policy
    response.headers["ETag"] = policy_tag(policy)
    return policy


@steering.put("/federations/{federation}/models/{number}/pin", status_code=204)
def pin_model(federation: str, number: OfVersion, pin: Pin, doing: Doing) -> None:
    """Keep the version of a round, under a label such as "best"."""
    doing.pin(federation, number, pin.label)


@steering.delete("/federations/{federation}/models/{number}/pin", status_code=204)
def unpin_model(federation: str, number: OfVersion, doing: Doing) -> None:
    """Keep the version of a round no longer than others."""
    doing.pin(federation, number, None)


@steering.post("/notifications/{channel}/test")
def test_channel(channel: str, request: Request) -> list[ChannelFacts]:
    """Send a test to a channel of [notify] now; 502 if it is not accepted."""
    notifier: Notifier = request.app.state.notifier
    tested = notifier.test(channel, known_from(request))
    if tested.failure:
        raise ProblemError(502, f"{tested.target} did not accept the test: {tested.failure}")
    return notifier.facts()


@steering.post("/devices/{device}/disable")
def disable(device: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> DeviceFacts:
    """Stop inviting a device to rounds until it is enabled. It stays enrolled."""
    doing.disable(device, why.reason)
    return one_device(known_from(request), device)


@steering.post("/devices/{device}/enable")
def enable(device: str, doing: Doing, request: Request) -> DeviceFacts:
    """Invite a disabled device again."""
    doing.enable(device)
    return one_device(known_from(request), device)


@steering.patch("/devices/{device}")
def describe(device: str, wanted: Description, doing: Doing, request: Request) -> DeviceFacts:
    """Change the labels, site and note of a device. They are the operator's and never reach the device."""
    doing.describe(device, wanted.model_dump())
    return one_device(known_from(request), device)


@steering.post("/devices/{device}/readmit")
def readmit(device: str, doing: Doing, request: Request) -> DeviceFacts:
    """Invite a device again that is left out after repeated failures; they no longer count."""
    doing.readmit(device)
    return one_device(known_from(request), device)


@steering.post("/devices/{device}/revoke")
async def revoke(device: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> Revoked:
    """Revoke a device: its certificates, keys and any open session. This can't be undone."""
    cut_off = partial(doing.revoke_device, device, why.reason)
    return await anyio.to_thread.run_sync(cut_off, limiter=request.app.state.waiting)


@steering.post("/enrolment-tokens", status_code=201)
def create_enrolment_token(wanted: WantedToken, doing: Doing) -> MadeToken:
    """Create a one-time enrolment token. It is shown only now."""
    return made_token(*doing.create_enrolment_token(wanted))


@steering.post("/enrolment-tokens/batch", status_code=201)
def create_enrolment_tokens(wanted: WantedToken, doing: Doing) -> list[MadeToken]:
    """Create one token for each device of a range such as line-1..line-20, at most 200, or none. They are shown only now."""
    return [made_token(*each) for each in doing.create_enrolment_tokens(wanted)]


@steering.delete("/enrolment-tokens/{token}")
def revoke_enrolment_token(token: str, doing: Doing) -> TokenFacts:
    """Revoke an unused enrolment token."""
    return token_facts(doing.revoke_enrolment_token(token), time.time())


@steering_admin.post("/api-tokens", status_code=201)
def create_api_token(wanted: NewApiToken, request: Request) -> MadeApiToken:
    """Create an API token. It is shown only now."""
    made = access_of(request).tokens.create(wanted.name, wanted.role, wanted.days)
    return MadeApiToken(token=made.text, **api_token_facts(made.record, time.time()).model_dump())


@steering_admin.delete("/api-tokens/{token}")
def revoke_api_token(token: str, request: Request) -> ApiTokenFacts:
    """Revoke an API token, and end all sessions that were opened with it."""
    return api_token_facts(access_of(request).tokens.revoke(token), time.time())


@own.delete("/sessions/{session}")
def end_session(session: str, request: Request) -> Session:
    """End an open session of the page: any as an admin, else one of your own."""
    return access_of(request).end_session(session, request.state.identity)


def _federation(request: Request, changed: FederationRecord) -> FederationFacts:
    return federation_facts(known_from(request), changed)
