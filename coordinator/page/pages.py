"""The routes of the page: screens that show facts, and forms that call the same operations as the API and the commands."""

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import HTMLResponse

from coordinator.errors import EnrolmentError, PlanError, SteeringError
from coordinator.facts.devices import DeviceFacts, Standing, device_facts, device_history, in_order
from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.models import model_versions, served_models, worth
from coordinator.facts.problems import Problem, open_problems
from coordinator.facts.sent import sent
from coordinator.facts.timeline import round_timeline
from coordinator.http.access import Role, access_of, end_session, require, set_session
from coordinator.http.changes import ChangeRoute, in_turn
from coordinator.http.operator_api import OfAttempt, OfRound, operations_of
from coordinator.http.refusals import ProblemError
from coordinator.members.enrolment import WantedToken, token_facts
from coordinator.operations.create_federation import example_plan, read_plan
from coordinator.operations.operations import Operations
from coordinator.page.views import View, form_of, own_path, plain_page, see_other, view_of
from coordinator.rounds.records import FederationStatus
from coordinator.storage.event_store import Event, EventFilter
from fedcg.config_file import numbered
from fedcg.learning.spec import RoundPolicy
from fedcg.sentences import texts

PER_PAGE = 100
SHOWN_CLIENTS = 100
DRAWN_NOW = 20
"""Clients in the timeline of the last round; that of a chosen round has `SHOWN_CLIENTS`."""
SHOWN_EVENTS = 200
PER_KIND = 20
ON_NOW = 8
PRESENCE_DAYS = (1, 7, 90)
SORTS = {"device": "id", "state": "standing", "seen": "seen_at", "certificate": "certificate_days"}
SORTS |= {name: name for name in ("health", "agent", "accuracy")}
"""Fields of a device by the name of their sortable column."""
STATES = get_args(Standing)
Asked = Annotated[View, Depends(view_of)]
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def front(view: Asked) -> Response:
    """The running federation, or how to create one."""
    federations = view.known.store.shown_federations()
    if not federations:
        return view.render("empty.html")
    running = [each for each in federations if each.id in view.known.services]
    return now((running or federations)[-1].id, view)


@router.get("/f/{federation}")
def now(federation: str, view: Asked, phase: str = "", number: OfRound = None, attempt: OfAttempt = None) -> Response:
    """The current state of a federation, its clients in one phase or in all, and the course of a round."""
    facts = view.facts(current_round, federation)
    return view.render(
        "now.html",
        federation=federation,
        is_same_for_all=True,
        facts=facts,
        record=view.known.federation(federation),
        clients=[each for each in facts.clients if phase in ("", each.phase.value)],
        phase=phase,
        timeline=view.facts(round_timeline, federation, number, attempt),
        recent=view.facts(_recent_events, federation),
        shown=SHOWN_CLIENTS,
        drawn=SHOWN_CLIENTS if number else DRAWN_NOW,
    )


@router.get("/f/{federation}/worth")
def is_it_worth_it(federation: str, view: Asked) -> Response:
    """Accuracies, and the clients that do worse than their local-only models."""
    return view.render("worth.html", federation=federation, facts=view.facts(worth, federation), shown=SHOWN_CLIENTS)


@router.get("/f/{federation}/models")
def models(federation: str, view: Asked) -> Response:
    """The versions of the shared model, and the exported models in use."""
    versions, served = view.facts(model_versions, federation), view.facts(served_models, federation)
    return view.render("models.html", federation=federation, versions=versions, served=served, shown=SHOWN_CLIENTS)


@router.get("/f/{federation}/sent")
def what_left(federation: str, view: Asked) -> Response:
    """What left each device."""
    facts = view.facts(sent, federation)
    return view.render("sent.html", federation=federation, facts=facts, shown=SHOWN_CLIENTS)


@router.get("/f/{federation}/sent.html")
def privacy_report(federation: str, view: Asked) -> Response:
    """The complete list of what left each device, as one file for the privacy officer."""
    facts = view.facts(sent, federation, True)  # noqa: FBT003 - a key of kept facts
    page = plain_page("sent_report.html", facts=facts, now=view.known.now)
    page.headers["Content-Disposition"] = f'attachment; filename="{facts.federation}-what-left-each-device.html"'
    return page


@router.get("/devices")
def devices(view: Asked, q: str = "", state: str = "", sort: str = "device", page: int = 1) -> Response:
    """All devices, sorted, filtered and searched."""
    every = view.facts(device_facts)
    found = _chosen(every, q, state, sort)
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, page), pages)
    return view.render(
        "devices.html",
        devices=found[(page - 1) * PER_PAGE : page * PER_PAGE],
        total=len(every),
        matching=len(found),
        counts={name: sum(each.standing == name for each in every) for name in STATES},
        asked={"q": q, "state": state, "sort": sort},
        page=page,
        pages=pages,
        states=STATES,
    )


@router.get("/devices/{device}")
def device(device: str, view: Asked, days: int = 1) -> Response:
    """One device: identity, health, history, presence."""
    days = days if days in PRESENCE_DAYS else 1
    history = view.facts(device_history, device, days)
    return view.render("device.html", history=history, days=days, choices=PRESENCE_DAYS)


@router.get("/repairs")
def repairs(view: Asked) -> Response:
    """Open problems, each with its remedy."""
    groups: dict[str, list[Problem]] = {}
    for each in view.facts(open_problems):
        groups.setdefault(each.kind, []).append(each)
    return view.render("repairs.html", groups=list(groups.items()), shown=PER_KIND)


@router.get("/events")
def events(
    view: Asked, event: str = "", client: str = "", federation: str = "", text: str = "", level: str = "info"
) -> Response:
    """The last events that match a filter, as the log's sentences."""
    wanted = EventFilter(event, client, federation, text, level)
    found = view.known.store.events.last(wanted, SHOWN_EVENTS)
    return view.render("events.html", found=found, wanted=wanted, shown=SHOWN_EVENTS)


@router.get("/enrolment")
def enrolment(view: Asked) -> Response:
    """Enrolment tokens."""
    return view.render("enrolment.html", **enrolment_values(view), made=None)


@router.get("/federations")
def federations(view: Asked, archived: bool = False) -> Response:
    """All federations with their controls; archived ones separately."""
    found = [(each.id, each.status is FederationStatus.ARCHIVED) for each in view.known.store.federations()[::-1]]
    every = [view.facts(current_round, name) for name, is_archived in found if is_archived is archived]
    return view.render("federations.html", every=every, archived=archived, others=len(found) - len(every))


@router.get("/federations/new")
def new_federation(view: Asked) -> Response:
    """A form with a commented plan."""
    return view.render("new_federation.html", plan=example_plan(), start=True, problems=[])


@router.get("/confirm/{action}/{name}")
def confirm(action: str, name: str, view: Asked, to: str = "") -> Response:
    """A change with its effect and its inputs; `to` is the page to return to. The query may suggest values of policy fields."""
    is_federation = action in CHANGES
    back = own_path(to or ("/federations" if is_federation else f"/devices/{name}"))
    found, inputs = texts().operations.get(action), []
    if action == "set":
        suggested = {key: value for key, value in view.request.query_params.items() if key in RoundPolicy.model_fields}
        inputs = policy_inputs(view.known.federation(name).policy, suggested)
    return view.render(
        "confirm.html", action=action, name=name, found=found, inputs=inputs, to=back, is_federation=is_federation
    )


def policy_inputs(policy: RoundPolicy, suggested: Mapping[str, str]) -> list[dict[str, Any]]:
    """Inputs of a form for the numbers of a policy, with bounds: of those with a suggested value, or of those in `STEERED`."""
    found = []
    for name in [name for name in STEERED if name in suggested] or STEERED:
        schema = RoundPolicy.model_json_schema()["properties"][name]
        bounds = next(iter(schema.get("anyOf", [schema])))
        present = getattr(policy, name)
        present = "" if present is None else f"{present:.12g}"
        step = "any" if bounds["type"] == "number" else "1"
        found.append({"name": name, "about": schema["description"], "present": present, "step": step, **bounds})
        found[-1]["value"] = suggested.get(name, present)
    return found


def enrolment_values(view: View) -> dict[str, Any]:
    """Values for the enrolment page: the tokens, newest first, and the URL of the listener."""
    tokens = view.known.store.register.tokens()[::-1][:PER_PAGE]
    config = view.request.app.state.home.config()
    return {
        "tokens": [token_facts(each, view.known.now) for each in tokens],
        "listener": config.url_of(config.enrolment),
    }


def _recent_events(known: Known, federation: str) -> list[Event]:
    return known.store.events.last(EventFilter(federation=federation, level="info"), ON_NOW)


def _chosen(devices: list[DeviceFacts], text: str, state: str, sort: str) -> list[DeviceFacts]:
    """The matching devices in order."""
    wanted = text.lower().strip()
    fit = [each for each in devices if (not state or each.standing == state) and _mentions(each, wanted)]
    return in_order(fit, SORTS.get(sort.removeprefix("-"), "id"), descending=sort.startswith("-"))


def _mentions(device: DeviceFacts, wanted: str) -> bool:
    return not wanted or any(wanted in text.lower() for text in (device.id, device.agent or "", *device.remarks))


STEERED = ("rounds", "min_clients", "min_cohort", "max_clients", "deadline_s", "max_attempts")
"""Policy fields in the form of the page."""
_NUMBER = re.compile(r"[0-9]{1,15}(\.[0-9]{1,15})?")
HOURS = ("1", "24", "168")
CHANGES: dict[str, Callable[[Operations, str, Mapping[str, str]], object]] = {
    "start": lambda doing, federation, _: doing.start(federation),
    "pause": lambda doing, federation, fields: doing.pause(federation, fields.get("reason", "")),
    "resume": lambda doing, federation, _: doing.resume(federation),
    "stop": lambda doing, federation, fields: doing.stop(federation, fields.get("reason", "")),
    "archive": lambda doing, federation, _: doing.archive(federation),
    "extend": lambda doing, federation, fields: doing.extend(federation, _rounds(fields)),
    "set": lambda doing, federation, fields: doing.change_policy(federation, _policy(fields)),
}
"""Changes of a federation by the last part of the form's URL."""
Fields = Annotated[dict[str, str], Depends(form_of)]
sessions = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
forms = APIRouter(
    route_class=ChangeRoute,
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
    """Open a session with an API token."""
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


@forms.post("/enrolment")
def make_token(view: Asked, fields: Fields) -> Response:
    """Create an enrolment token and show it once."""
    hours = fields.get("hours", "24")
    if hours not in HOURS:
        raise EnrolmentError(f"hours = {hours!r}: choose one of {', '.join(HOURS)}")
    device, federation = fields.get("device") or None, fields.get("federation") or None
    wanted = WantedToken.model_construct(
        device=device, hours=float(hours), federation=federation
    )  # checked by the operation
    made, record = operations_of(view.request).create_enrolment_token(wanted)
    return view.render("enrolment.html", **enrolment_values(view), made=made, expires_at=record.expires_at)


@forms.post("/enrolment/{token}/delete")
def delete_token(token: str, view: Asked) -> Response:
    """Revoke an enrolment token."""
    operations_of(view.request).revoke_enrolment_token(token)
    return see_other("/enrolment")


@forms.post("/devices/{device}/{action}")
def change_device(device: str, action: str, view: Asked, fields: Fields) -> Response:
    """Disable, enable or readmit a device, or create a token for its replacement."""
    operations = operations_of(view.request)
    if action == "disable":
        operations.disable(device, fields.get("reason", ""))
    elif action == "enable":
        operations.enable(device)
    elif action == "readmit":
        operations.readmit(device)
    elif action == "replace":
        wanted = WantedToken.model_construct(replaces=device, federation=fields.get("federation") or None)
        made, record = operations.create_enrolment_token(wanted)
        return view.render("enrolment.html", **enrolment_values(view), made=made, expires_at=record.expires_at)
    else:
        raise SteeringError(f"{action!r} is not a device action; choose disable, enable, readmit or replace")
    view.changed()
    return see_other(own_path(fields.get("to") or f"/devices/{device}"))


@forms.post("/federations/new")
async def create_federation(request: Request, view: Asked, fields: Fields) -> Response:
    """Create a federation from a plan, and start it if requested."""
    text, start = fields.get("plan", ""), fields.get("start") == "yes"

    def create() -> Response:
        try:
            federation = _created(operations_of(request), text, start=start)
        except PlanError as error:
            problems = [line for line in map(str.strip, numbered(text, str(error).split("\n  "))) if line]
            return view.render("new_federation.html", status=422, plan=text, start=start, problems=problems)
        view.changed()
        return see_other(f"/f/{federation}")

    return await in_turn(request, create)


@forms.post("/federations/{federation}/{action}")
def steer(federation: str, action: str, view: Asked, fields: Fields) -> Response:
    """Start, pause, resume, stop, archive or extend a federation, or change its policy."""
    change = CHANGES.get(action)
    if change is None:
        raise SteeringError(f"{action!r} is not a federation action; choose one of {', '.join(CHANGES)}")
    change(operations_of(view.request), federation, fields)
    view.changed()
    return see_other(own_path(fields.get("to") or "/federations"))


def _rounds(fields: Mapping[str, str]) -> int:
    """The number of rounds to add."""
    rounds = fields.get("rounds", "")
    if not (rounds.isascii() and rounds.isdigit() and len(rounds) < 6):
        raise SteeringError(f"rounds = {rounds!r}: enter the number of rounds to add, as a whole number")
    return int(rounds)


def _policy(fields: Mapping[str, str]) -> dict[str, object]:
    """The policy fields that differ from the form's values when it was shown, so that it reverts no other operator's change."""
    sent = {name: fields[name] for name in STEERED if name in fields and fields[name] != fields.get(f"was_{name}")}
    changed: dict[str, object] = {
        name: (float if "." in text else int)(text) if _NUMBER.fullmatch(text) else text or None
        for name, text in sent.items()
    }
    if not changed:
        raise SteeringError("nothing was changed: all values are the present ones")
    return changed


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
