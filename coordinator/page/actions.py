"""The forms: every one calls the operations that the API and the commands call, and leads to the page that shows the change."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from coordinator.errors import EnrolmentError, PlanError, SteeringError
from coordinator.http.access import Role, access_of, end_session, require, set_session
from coordinator.http.changes import in_turn
from coordinator.http.problems import ProblemError
from coordinator.operations.create_federation import read_plan
from coordinator.operations.operations import Operations
from coordinator.page.pages import Asked, enrolment_values
from coordinator.page.views import FormRoute, PageRoute, form_of, own_path, plain_page, see_other
from fedcg.config_file import numbered

HOURS = ("1", "24", "168")
CHANGES: dict[str, Callable[[Operations, str, str, int], object]] = {
    "start": lambda doing, federation, _reason, _rounds: doing.start(federation),
    "pause": lambda doing, federation, reason, _rounds: doing.pause(federation, reason),
    "resume": lambda doing, federation, _reason, _rounds: doing.resume(federation),
    "stop": lambda doing, federation, reason, _rounds: doing.stop(federation, reason),
    "archive": lambda doing, federation, _reason, _rounds: doing.archive(federation),
    "extend": lambda doing, federation, _reason, rounds: doing.extend(federation, rounds),
}
"""Changes of a federation by the last part of the form's address."""
Fields = Annotated[dict[str, str], Depends(form_of)]
sessions = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)
router = APIRouter(
    route_class=FormRoute,
    include_in_schema=False,
    default_response_class=HTMLResponse,
    dependencies=[Depends(require(Role.OPERATOR))],
)


@sessions.get("/login")
def login_form(to: str = "/") -> Response:
    """The form for a token."""
    return plain_page("login.html", to=own_path(to), problem="")


@sessions.post("/login")
async def login(request: Request, fields: Fields) -> Response:
    """Open a session with a token of the API."""
    to = own_path(fields.get("to", "/"))
    try:
        session = await access_of(request).sign_in(fields.get("token", ""), request)
    except ProblemError as error:
        return plain_page("login.html", error.status, to=to, problem=error.detail)
    answer = see_other(to)
    set_session(answer, session, secure=request.url.scheme == "https")
    return answer


@sessions.post("/logout")
async def logout(view: Asked) -> Response:
    """End the session."""
    answer = see_other("/login")
    await access_of(view.request).sign_out(view.request)
    end_session(answer)
    return answer


@router.post("/enrolment")
def make_token(view: Asked, fields: Fields) -> Response:
    """Make an enrolment token and show it, once."""
    hours = fields.get("hours", "24")
    if hours not in HOURS:
        raise EnrolmentError(f"hours = {hours!r}: choose one of {', '.join(HOURS)}")
    made = _operations(view.request).create_enrolment_token(
        device=fields.get("device") or None, hours=float(hours), federation=fields.get("federation") or None
    )
    return view.render("enrolment.html", **enrolment_values(view), made=made)


@router.post("/enrolment/{token}/delete")
def delete_token(token: str, view: Asked) -> Response:
    """Make a token unusable."""
    _operations(view.request).revoke_enrolment_token(token)
    return see_other("/enrolment")


@router.post("/devices/{device}/{action}")
def change_device(device: str, action: str, view: Asked, fields: Fields) -> Response:
    """Disable or enable a device."""
    reason = fields.get("reason", "")
    if action == "disable":
        _operations(view.request).disable(device, reason)
    elif action == "enable":
        _operations(view.request).enable(device)
    else:
        raise SteeringError(f"a device is enabled or disabled, not {action!r}")
    view.changed()
    return see_other(f"/devices/{device}")


@router.post("/federations/new")
async def create_federation(request: Request, view: Asked, fields: Fields) -> Response:
    """Create a federation from a plan, and start it where that was chosen."""
    text, start = fields.get("plan", ""), fields.get("start") == "yes"

    def create() -> Response:
        try:
            federation = _created(_operations(request), text, start=start)
        except PlanError as error:
            problems = [line for line in map(str.strip, numbered(text, str(error).split("\n  "))) if line]
            return view.render("new_federation.html", status=422, plan=text, start=start, problems=problems)
        view.changed()
        return see_other(f"/f/{federation}")

    return await in_turn(request, create)


@router.post("/federations/{federation}/{action}")
def steer(federation: str, action: str, view: Asked, fields: Fields) -> Response:
    """Start, pause, resume, stop, archive or extend a federation."""
    change, rounds = CHANGES.get(action), fields.get("rounds", "")
    reason = fields.get("reason", "")
    if change is None:
        raise SteeringError(f"{action!r} is not a change of a federation: {', '.join(CHANGES)}")
    if action == "extend" and not (rounds.isascii() and rounds.isdigit() and len(rounds) < 6):
        raise SteeringError(f"rounds = {rounds!r}: write how many rounds to add, as a whole number")
    more = int(rounds) if action == "extend" else 0
    change(_operations(view.request), federation, reason, more)
    view.changed()
    return see_other("/federations")


def _created(operations: Operations, text: str, *, start: bool) -> str:
    """Create a federation from the text of a plan; returns its id."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        path.write_text(text, encoding="utf-8")
        try:
            plan = read_plan(path, complete=operations.complete)
        except PlanError as error:
            raise PlanError(str(error).replace(str(path), "the plan")) from error
    return operations.create_federation(plan, start=start).id


def _operations(request: Request) -> Operations:
    operations: Operations = request.app.state.operations
    return operations
