"""The forms: every one calls the same functions as the commands, and leads back to the page that shows the change."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse

from coordinator.errors import EnrolmentError, PlanError, SteeringError
from coordinator.facts.known import Known
from coordinator.http.access import Role, access_of, end_session, set_session
from coordinator.http.problems import ProblemError
from coordinator.members.tokens import create_token, revoke_token
from coordinator.page.pages import Asked, enrolment_values
from coordinator.page.views import PageRoute, form_of, own_path, plain_page, see_other
from coordinator.paths import Home
from coordinator.service.coordinator import Coordinator
from coordinator.service.create_federation import open_federation, read_plan
from coordinator.service.steering import Steering

HOURS = (1.0, 24.0, 168.0)
Fields = Annotated[dict[str, str], Depends(form_of)]
router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/login")
def login_form(to: str = "/") -> Response:
    """The form for a token."""
    return plain_page("login.html", to=own_path(to), problem="")


@router.post("/login")
async def login(request: Request, fields: Fields) -> Response:
    """Open a session with a token of the API."""
    to = own_path(fields.get("to", "/"))
    try:
        _, session = await access_of(request).sign_in(fields.get("token", ""), request)
    except ProblemError as error:
        return plain_page("login.html", error.status, to=to, problem=error.detail)
    answer = see_other(to)
    set_session(answer, session, secure=request.url.scheme == "https")
    return answer


@router.post("/logout")
async def logout(view: Asked) -> Response:
    """End the session."""
    answer = see_other("/login")
    end_session(answer)
    return answer


@router.post("/enrolment")
def make_token(view: Asked, fields: Fields) -> Response:
    """Make an enrolment token and show it, once."""
    view.require(Role.OPERATOR)
    hours = fields.get("hours", "24")
    if hours not in {f"{each:g}" for each in HOURS}:
        raise EnrolmentError(f"hours = {hours!r}: choose one of {', '.join(f'{each:g}' for each in HOURS)}")
    token = create_token(
        view.request.app.state.home,
        view.known.store,
        view.known.now,
        device=fields.get("device") or None,
        hours=float(hours),
        federation=fields.get("federation") or None,
    )
    until = view.known.now + float(hours) * 3600
    _coordinator(view.request).events.write("token_created", token=token.id, client=token.device or "", until=until)
    return view.render("enrolment.html", **enrolment_values(view), made=(token, until))


@router.post("/enrolment/{token}/delete")
def delete_token(token: str, view: Asked) -> Response:
    """Make a token unusable."""
    view.require(Role.OPERATOR)
    revoke_token(view.known.store, token, view.known.now)
    _coordinator(view.request).events.write("token_revoked", token=token)
    return see_other("/enrolment")


@router.post("/devices/{device}/{action}")
def change_device(device: str, action: str, view: Asked, fields: Fields) -> Response:
    """Disable or enable a device."""
    view.require(Role.OPERATOR)
    steering = _steering(view.request)
    if action == "disable":
        steering.disable(device, fields.get("reason", ""))
    elif action == "enable":
        steering.enable(device)
    else:
        raise SteeringError(f"a device is enabled or disabled, not {action!r}")
    view.changed()
    return see_other(f"/devices/{device}")


@router.post("/federations/new")
async def create_federation(request: Request, view: Asked, fields: Fields) -> Response:
    """Create a federation from a plan, and start it where that was chosen."""
    view.require(Role.OPERATOR)
    text, held = fields.get("plan", ""), fields.get("start") != "yes"
    try:
        federation = await run_in_threadpool(_opened, request.app.state.home, view.known, text, held)
    except PlanError as error:
        problems = [line.strip() for line in str(error).split("\n") if line.strip()]
        return await run_in_threadpool(
            lambda: view.render("new_federation.html", status=422, plan=text, problems=problems)
        )
    await run_in_threadpool(_coordinator(request).follow, federation)
    view.changed()
    return see_other(f"/f/{federation}")


@router.post("/federations/{federation}/{action}")
def steer(federation: str, action: str, view: Asked, fields: Fields) -> Response:
    """Start, pause, resume, stop or extend a federation."""
    view.require(Role.OPERATOR)
    steering, reason = _steering(view.request), fields.get("reason", "")
    if action == "extend":
        rounds = fields.get("rounds", "")
        if not (rounds.isascii() and rounds.isdigit() and len(rounds) < 6):
            raise SteeringError(f"rounds = {rounds!r}: write how many rounds to add, as a whole number")
        steering.extend(federation, int(rounds))
    elif action == "pause":
        steering.pause(federation, reason)
    elif action == "stop":
        steering.stop(federation, reason)
    elif action == "start":
        steering.start(federation)
    elif action == "resume":
        steering.resume(federation)
    else:
        raise SteeringError(f"{action!r} is not a change of a federation: start, pause, resume, stop, extend")
    view.changed()
    return see_other("/federations")


def _opened(home: Home, known: Known, text: str, held: bool) -> str:
    """Create a federation from the text of a plan; returns its id."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, encoding="utf-8")
        try:
            plan = read_plan(path)
        except PlanError as error:
            raise PlanError(str(error).replace(str(path), "the plan")) from error
    with home.changing_members():
        return open_federation(home, known.store, plan, held=held).id


def _coordinator(request: Request) -> Coordinator:
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


def _steering(request: Request) -> Steering:
    coordinator = _coordinator(request)
    return Steering(coordinator.store, coordinator.events, coordinator.follow)
