"""The routes that change something: federations, devices, enrolment tokens, API tokens. The work is in `operations`."""

from __future__ import annotations

import time
from functools import partial
from typing import Annotated

import anyio.to_thread
from fastapi import APIRouter, Body, Depends, Header, Request, Response
from pydantic import ConfigDict, Field

from coordinator.facts.devices import DeviceFacts, one_device
from coordinator.facts.federations import FederationFacts, federation_facts
from coordinator.facts.tokens import ApiTokenFacts, TokenFacts, api_token_facts, token_facts
from coordinator.http.access import Role, access_of, require
from coordinator.http.changes import ChangeRoute, in_turn
from coordinator.http.facts_api import known_from, policy_tag
from coordinator.http.problems import PROBLEMS, ProblemError
from coordinator.members.api_tokens import DAYS, MAX_DAYS
from coordinator.members.revocation import Revoked
from coordinator.members.tokens import MAX_TOKEN_HOURS, TOKEN_HOURS
from coordinator.operations.create_federation import OperatorPlan
from coordinator.operations.operations import MAX_REASON, MadeToken, Operations
from coordinator.rounds.records import DeviceRecord, FederationRecord
from fedcg.config_file import Settings
from fedcg.learning.spec import RoundPolicy

EXAMPLE_PLAN = {
    "federation": "casting",
    "classes": ["good", "crack", "pore"],
    "method": "fedcg",
    "rounds": 20,
    "image": {"mode": "RGB", "height": 32, "width": 32, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
}


class _Content(Settings):
    model_config = ConfigDict(allow_inf_nan=False)


class NewFederation(_Content):
    """A federation to open.

    Attributes:
        plan: as docs/plan.md describes it.
        start: else it is only created, and `start` starts it.
        continued_from: a federation whose last aggregate has the initial weights.
    """

    plan: Annotated[OperatorPlan, Field(examples=[EXAMPLE_PLAN])]
    start: bool = True
    continued_from: Annotated[str, Field(max_length=63)] | None = None


class Reason(_Content):
    """Why something is done; it stands in the log and on the page."""

    reason: Annotated[str, Field(max_length=MAX_REASON, examples=["the line is being rebuilt"])] = ""


class MoreRounds(_Content):
    """How many rounds to add."""

    rounds: Annotated[int, Field(ge=1, le=100_000, examples=[10])]


class NewToken(_Content):
    """An enrolment token to make; the fields are the options of `fedcg token create`."""

    device: Annotated[str, Field(max_length=63, examples=["line-4"])] | None = None
    replaces: Annotated[str, Field(max_length=63)] | None = None
    hours: Annotated[float, Field(gt=0, le=MAX_TOKEN_HOURS)] = TOKEN_HOURS
    url: Annotated[str, Field(max_length=300)] | None = None
    federation: Annotated[str, Field(max_length=63)] | None = None


class NewApiToken(_Content):
    """An API token to make; it expires after `days`."""

    name: Annotated[str, Field(min_length=1, max_length=64, examples=["ann"])]
    role: Role
    days: Annotated[float, Field(gt=0, le=MAX_DAYS)] = DAYS


class MadeApiToken(ApiTokenFacts, frozen=True):
    """A new API token; `token` is shown this once."""

    token: str


def _operations(request: Request) -> Operations:
    operations: Operations = request.app.state.operations
    return operations


def changing(role: Role) -> APIRouter:
    """Routes under /api/v1 with which this role may change something."""
    needed = [Depends(require(role))]
    return APIRouter(
        prefix="/api/v1", route_class=ChangeRoute, dependencies=needed, responses=PROBLEMS, tags=["change"]
    )


Doing = Annotated[Operations, Depends(_operations)]
NO_REASON = Reason()
router, admin = changing(Role.OPERATOR), changing(Role.ADMIN)


@router.post("/federations", status_code=201)
async def create_federation(
    wanted: NewFederation, doing: Doing, request: Request, response: Response
) -> FederationFacts:
    """Open a federation; it takes some seconds, one after the other."""
    create = partial(doing.create_federation, wanted.plan, start=wanted.start, continued_from=wanted.continued_from)
    record = await in_turn(request, create)
    response.headers["Location"] = f"/api/v1/federations/{record.id}"
    return await anyio.to_thread.run_sync(_federation, request, record)


@router.post("/federations/{federation}/start")
def start(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Start a federation that was created and not started."""
    return _federation(request, doing.start(federation))


@router.post("/federations/{federation}/pause")
def pause(federation: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> FederationFacts:
    """Open no further attempt; the open one ends as it would."""
    return _federation(request, doing.pause(federation, why.reason))


@router.post("/federations/{federation}/resume")
def resume(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Let a federation go on that an operator paused, or that stalled after failed attempts."""
    return _federation(request, doing.resume(federation))


@router.post("/federations/{federation}/stop")
def stop(federation: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> FederationFacts:
    """End a federation now; its devices keep the last aggregate."""
    return _federation(request, doing.stop(federation, why.reason))


@router.post("/federations/{federation}/extend")
def extend(federation: str, more: MoreRounds, doing: Doing, request: Request) -> FederationFacts:
    """Add rounds, also to a federation that is over or was stopped."""
    return _federation(request, doing.extend(federation, more.rounds))


@router.post("/federations/{federation}/archive")
def archive(federation: str, doing: Doing, request: Request) -> FederationFacts:
    """Take one that is over, or was never started, off the lists; its data stays, and `extend` brings it back."""
    return _federation(request, doing.archive(federation))


@router.patch("/federations/{federation}/policy")
def change_policy(
    federation: str,
    changes: Annotated[
        dict[str, object],  # the policy checks them, and names everything that is wrong
        Body(examples=[{"min_clients": 4, "deadline_s": 1800}], max_length=64),
    ],
    doing: Doing,
    response: Response,
    if_match: Annotated[str | None, Header()] = None,
) -> RoundPolicy:
    """Change fields of the policy; with If-Match only where it is still the one that was read."""

    def check(policy: RoundPolicy) -> None:
        if if_match is not None and if_match.strip() not in ("*", policy_tag(policy)):
            raise ProblemError(412, f"the policy of {federation} was changed meanwhile; read it again")

    policy = doing.change_policy(federation, changes, check).policy
    response.headers["ETag"] = policy_tag(policy)
    return policy


@router.post("/devices/{device}/disable")
def disable(device: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> DeviceFacts:
    """Invite a device no more until it is enabled; it stays enrolled."""
    return _device(request, doing.disable(device, why.reason))


@router.post("/devices/{device}/enable")
def enable(device: str, doing: Doing, request: Request) -> DeviceFacts:
    """Invite a disabled device again."""
    return _device(request, doing.enable(device))


@router.post("/devices/{device}/revoke")
async def revoke(device: str, doing: Doing, request: Request, why: Reason = NO_REASON) -> Revoked:
    """Cut a device off: certificates, keys, and the session that it may have. It can't be undone."""
    cut_off = partial(doing.revoke_device, device, why.reason)
    return await anyio.to_thread.run_sync(cut_off, limiter=request.app.state.waiting)


@router.post("/enrolment-tokens", status_code=201)
def create_enrolment_token(wanted: NewToken, doing: Doing) -> MadeToken:
    """Make a one-time token with which a device enrols; it is shown this once."""
    return doing.create_enrolment_token(**wanted.model_dump())


@router.delete("/enrolment-tokens/{token}")
def revoke_enrolment_token(token: str, doing: Doing) -> TokenFacts:
    """Make a token that was not used yet unusable."""
    return token_facts(doing.revoke_enrolment_token(token), time.time())


@admin.post("/api-tokens", status_code=201)
def create_api_token(wanted: NewApiToken, request: Request) -> MadeApiToken:
    """Make a token of this API; it is shown this once."""
    made = access_of(request).tokens.create(wanted.name, wanted.role, wanted.days)
    return MadeApiToken(token=made.text, **api_token_facts(made.record, time.time()).model_dump())


@admin.delete("/api-tokens/{token}")
def revoke_api_token(token: str, request: Request) -> ApiTokenFacts:
    """Make a token of this API unusable, with every session that was opened with it."""
    return api_token_facts(access_of(request).tokens.revoke(token), time.time())


def _federation(request: Request, changed: FederationRecord) -> FederationFacts:
    return federation_facts(known_from(request), changed)


def _device(request: Request, changed: DeviceRecord) -> DeviceFacts:
    return one_device(known_from(request), changed.id)
