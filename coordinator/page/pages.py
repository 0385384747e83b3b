"""The routes of the page: screens that show facts, and forms that call the same operations as the API and the commands."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

import tomllib
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BeforeValidator, ValidationError

from coordinator.broker.access_lists import NOT_APPLIED
from coordinator.errors import EnrolmentError, PlanError, SteeringError
from coordinator.facts.audits import device_audits
from coordinator.facts.comparison import compared
from coordinator.facts.devices import DeviceFilter, Standing, device_facts, device_history, in_order
from coordinator.facts.enrolment import enrolments
from coordinator.facts.federations import current_round
from coordinator.facts.known import Known
from coordinator.facts.models import model_versions, served_models, worth
from coordinator.facts.overview import search, summaries
from coordinator.facts.policy import plan_like, policy_changes
from coordinator.facts.problems import Problem, open_problems
from coordinator.facts.sent import Comparison, OwnRecord, compare_records, sent
from coordinator.facts.timeline import round_timeline
from coordinator.http.access import Role, access_of, end_session, require, session_id, set_session
from coordinator.http.changes import ChangeRoute, in_turn
from coordinator.http.oidc import CALLBACK, FLOW_COOKIE, FLOW_PATH, FLOW_S
from coordinator.http.operator_api import MAX_ID, OfAttempt, OfRound, made_token, operations_of, policy_tag, unchanged
from coordinator.http.refusals import ProblemError
from coordinator.members.enrolment import WantedToken, tokens_csv
from coordinator.members.membership import Revoked
from coordinator.operations.create_federation import example_plan, read_plan
from coordinator.operations.operations import Operations, source_of
from coordinator.page.plan_form import plan_page, plan_text_of
from coordinator.page.views import View, form_of, moment_of, own_path, plain_page, qr_code, see_other, view_of
from coordinator.storage.event_store import Event, EventFilter
from fedcg.config_file import numbered, plain_value, problems_in_words
from fedcg.learning.project import plan_text
from fedcg.learning.spec import RoundPolicy
from fedcg.sentences import texts

PER_PAGE = 100
SHOWN_CLIENTS = 100
DRAWN_NOW = 20
"""Clients in the timeline of the last round; that of a chosen round has `SHOWN_CLIENTS`."""
SHOWN_EVENTS = 200
PER_KIND = 20
MAX_PATH = 300
ON_NOW = 8
PRESENCE_DAYS = (1, 7, 90)
SHOWN_COLUMNS = ["state", "seen", "site", "labels", "health", "version", "certificate", "accuracy", "remarks"]
COLUMNS = [*SHOWN_COLUMNS[:-1], "federations", "hardware", "images", "note", "remarks"]
"""The columns of the devices: the usual ones, and all that a reader can choose."""
FIELDS = {"device": "id", "state": "standing", "seen": "seen_at", "version": "agent", "certificate": "certificate_days"}
"""The fields that columns are sorted by, where these have other names."""
STATES = get_args(Standing)
MAX_CHOSEN = 1000
"""Most devices that one form changes."""
Asked = Annotated[View, Depends(view_of)]
Wanted = Annotated[DeviceFilter, Depends()]
Several = Annotated[list[str] | None, Query()]
Text = Annotated[str, Query(max_length=63)]
Fields = Annotated[dict[str, str], Depends(form_of)]
router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def front(view: Asked) -> Response:
    """All federations, or how to create one."""
    return federations(view) if view.known.store.federations() else view.render("empty.html")


@router.get("/search")
def search_results(view: Asked, q: Annotated[str, Query(max_length=100)] = "") -> Response:
    """Devices, federations and models that match a text."""
    return view.render("search.html", q=q, found=view.facts(search, q))


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
def is_it_worth_it(federation: str, view: Asked, beside: Text = "") -> Response:
    """Accuracies, the clients that do worse than their local-only models, and the curve of another federation `beside`."""
    facts, track = view.facts(worth, federation), view.request.app.state.home.config().track
    other = {number: mean for number, mean, _ in view.facts(worth, beside).mean} if beside else {}
    values = {"facts": facts, "beside": beside, "other": other, "track": track, "shown": SHOWN_CLIENTS}
    return view.render("worth.html", federation=federation, **values)


@router.get("/f/{federation}/models")
def models(federation: str, view: Asked) -> Response:
    """The versions of the shared model, and the exported models in use."""
    versions, served = view.facts(model_versions, federation), view.facts(served_models, federation)
    first_kept = versions[0].round - view.request.app.state.home.config().storage.keep_rounds
    values = {"versions": versions, "served": served, "first_kept": first_kept, "shown": SHOWN_CLIENTS}
    return view.render("models.html", federation=federation, **values)


@router.get("/f/{federation}/compare")
def compare(federation: str, view: Asked, first: Text = "", second: Text = "") -> Response:
    """Two versions or two devices side by side."""
    read = view.request.app.state.coordinator.artifacts.get
    found = compared(view.known, federation, first, second, read)
    return view.render("compare.html", federation=federation, first=first, second=second, found=found)


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


@router.get("/f/{federation}/sent/{device}")
def what_left_a_device(federation: str, device: str, view: Asked) -> Response:
    """Every update of a device."""
    return _sent_page(view, federation, device)


@router.post("/f/{federation}/sent/{device}")
def compare_with_device(federation: str, device: str, view: Asked, fields: Fields) -> Response:
    """Every update of a device, compared with the device's own record. Nothing is stored."""
    facts = view.facts(sent, federation, True, device)  # noqa: FBT003 - a key of kept facts
    try:
        record = OwnRecord.read(fields.get("record", ""))
        found = compare_records(record, federation, [vars(each) for each in facts.devices[0].rounds])
    except ValidationError:
        found, wrong = None, "This is not the output of fedcg agent sent --json."
    else:
        wrong = "" if record.device == device else f"This is the record of {record.device[:100]!r}."
    return _sent_page(view, federation, device, None if wrong else found, wrong)


def _sent_page(view: View, federation: str, device: str, found: Comparison | None = None, wrong: str = "") -> Response:
    facts = view.facts(sent, federation, True, device)  # noqa: FBT003 - a key of kept facts
    keep = view.request.app.state.home.config().storage.keep_rounds
    status, closed = 422 if wrong else 200, view.known.store.aggregates(federation)[-1].round
    values = {"facts": facts, "found": found, "wrong": wrong, "first_kept": closed - keep + 1, "keep": keep}
    return view.render("sent_device.html", status=status, federation=federation, **values)


@router.get("/f/{federation}/audits")
def audits(federation: str, view: Asked) -> Response:
    """Audits of updates on devices."""
    facts = view.facts(device_audits, federation)
    return view.render("audits.html", federation=federation, facts=facts, shown=SHOWN_CLIENTS)


@router.get("/devices")
def devices(view: Asked, wanted: Wanted, columns: Several = None, sort: str = "device", page: int = 1) -> Response:
    """All devices, sorted, filtered and searched."""
    every = view.facts(device_facts)
    name = sort.removeprefix("-")
    field = FIELDS.get(name, name if name in COLUMNS else "id")
    found = in_order(wanted.of(every), field, descending=sort.startswith("-"))
    pages = max(1, -(-len(found) // PER_PAGE))
    page = min(max(1, page), pages)
    shown = [each for each in COLUMNS if each in (columns or ())] or SHOWN_COLUMNS
    asked = vars(wanted) | {"sort": sort, "columns": shown, "page": page}

    def address(**changes: object) -> str:
        """The address of this list with changes, without what is the default."""
        values = [each for each in (asked | changes).items() if each[1] not in ("", "device", 1, SHOWN_COLUMNS)]
        return f"/devices?{urlencode(values, doseq=True)}"

    answer = view.render(
        "devices.html",
        devices=found[(page - 1) * PER_PAGE : page * PER_PAGE],
        total=len(every),
        matching=len(found),
        counts={name: sum(each.standing == name for each in every) for name in STATES},
        choices={"state": STATES} | wanted.choices(every),
        asked=asked,
        address=address,
        columns=COLUMNS,
        pages=pages,
    )
    answer.headers["HX-Replace-Url"] = address()
    return answer


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


Moment = Annotated[float | None, BeforeValidator(moment_of)]


@router.get("/events")
def events(
    view: Asked,
    event: str = "",
    client: str = "",
    federation: str = "",
    text: str = "",
    level: str = "info",
    since: Annotated[Moment, Query(alias="from")] = None,
    until: Annotated[Moment, Query(alias="to")] = None,
    before: Annotated[int | None, Query(ge=0, le=MAX_ID)] = None,
) -> Response:
    """The last events that match a filter, or those before the event with the id `before`, as the log's sentences."""
    wanted = EventFilter(event, client, federation, text, level, since, until)
    found = view.known.store.events.last(wanted, SHOWN_EVENTS, before)
    named = [each.id for each in view.known.store.federations()]
    return view.render("events.html", found=found, wanted=wanted, shown=SHOWN_EVENTS, named=named)


@router.get("/notifications")
def notifications(view: Asked) -> Response:
    """The channels for messages about problems."""
    return view.render("notifications.html", channels=view.request.app.state.notifier.facts())


@router.get("/sessions")
def open_sessions(view: Asked) -> Response:
    """The open sessions of the page: all for an admin, else one's own."""
    found = access_of(view.request).list_sessions(view.identity)
    return view.render("sessions.html", sessions=found, this=session_id(view.request))


@router.get("/enrolment")
def enrolment(view: Asked) -> Response:
    """Enrolment tokens, and a form for new ones; `device` and `replaces` in the URL fill it in."""
    return view.render("enrolment.html", **enrolment_values(view), made=None)


@router.get("/f/{federation}/policy")
def policy(federation: str, view: Asked) -> Response:
    """The policy of a federation: a form, and the history of its changes."""
    return _policy_page(view, federation, dict(view.request.query_params), [])


def _policy_page(
    view: View, federation: str, given: dict[str, str], problems: list[str], status: int = 200
) -> Response:
    """The policy with the given input and its problems."""
    policy, changes = view.known.federation(federation).policy, policy_changes(view.known, federation)
    values: dict[str, Any] = {
        "policy": policy,
        "tag": given.get("tag", policy_tag(policy)),
        "changes": changes,
        "given": given,
    }
    values |= {"fields": RoundPolicy.model_json_schema()["properties"], "problems": problems}
    return view.render("policy.html", federation=federation, status=status, **values)


@router.get("/federations")
def federations(view: Asked, archived: bool = False) -> Response:
    """All federations with their controls; archived ones separately."""
    every = view.facts(summaries, archived)
    others = len(view.known.store.federations()) - len(every)
    return view.render("federations.html", every=every, archived=archived, others=others)


@router.get("/federations/new/plan")
@router.get("/federations/new")
def new_federation(view: Asked, like: str = "", continued_from: str = "") -> Response:
    """A form that writes a plan: an example, or one like that of the federation `like`, perhaps with the weights of ID@ROUND."""
    if continued_from:
        source_of(view.known.store, continued_from)
    plan = plan_like(view.known, like).model_dump(mode="json", exclude_defaults=True) if like else None
    return plan_page(
        view,
        plan_text(tomllib.loads(example_plan()) if plan is None else plan),
        {"continued_from": continued_from, "start": "yes"} if continued_from else {},
    )


@router.get("/confirm/{action}/{name}")
def confirm(action: str, name: str, view: Asked, to: str = "") -> Response:
    """A change with its effect; `to` is the page to return to."""
    is_federation = action in CHANGES
    back = own_path(to or ("/federations" if is_federation else f"/devices/{name}"))
    found = texts().operations.get(action) if is_federation or action in ("enable", "disable", "readmit") else None
    return view.render("confirm.html", action=action, name=name, found=found, to=back, is_federation=is_federation)


@router.get("/confirm/devices")
def confirm_devices(
    view: Asked, wanted: Wanted, action: str = "", device: Several = None, scope: str = "selected"
) -> Response:
    """A confirmation of a change of several devices: those selected, or with the scope `matching` all that match a filter."""
    found = [each.id for each in wanted.of(view.facts(device_facts))] if scope == "matching" else device or []
    chosen = found[:MAX_CHOSEN]
    return view.render("confirm_devices.html", action=action, label="", chosen=chosen, results={})


def enrolment_values(view: View) -> dict[str, Any]:
    """Values for the enrolment page: the tokens, newest first, and the URL of the listener."""
    config = view.request.app.state.home.config()
    return {"tokens": view.facts(enrolments)[:PER_PAGE], "listener": config.url_of(config.enrolment)}


def _recent_events(known: Known, federation: str) -> list[Event]:
    return known.store.events.last(EventFilter(federation=federation, level="info"), ON_NOW)


PLAN = Path("the plan")
"""What errors call a plan without a file."""
Change = Callable[[Operations, str, Mapping[str, str]], object]
CHANGES: dict[str, Change] = {
    "start": lambda doing, federation, _: doing.start(federation),
    "pause": lambda doing, federation, fields: doing.pause(federation, fields.get("reason", "")),
    "resume": lambda doing, federation, _: doing.resume(federation),
    "stop": lambda doing, federation, fields: doing.stop(federation, fields.get("reason", "")),
    "archive": lambda doing, federation, _: doing.archive(federation),
    "extend": lambda doing, federation, fields: doing.extend(federation, _rounds(fields)),
}
"""Changes of a federation by the last part of the form's URL."""
BULK: dict[str, Change] = {
    "disable": lambda doing, device, fields: doing.disable(device, fields.get("reason", "")),
    "enable": lambda doing, device, _: doing.enable(device),
    "label": lambda doing, device, fields: doing.describe(device, {"add_labels": [fields.get("label", "")]}),
    "unlabel": lambda doing, device, fields: doing.describe(device, {"remove_labels": [fields.get("label", "")]}),
    "revoke": lambda doing, device, fields: doing.revoke_device(device, fields.get("reason", "")),
}
"""Changes of one or several devices."""
OF_DEVICE = BULK | {
    "readmit": lambda doing, device, _: doing.readmit(device),
    "describe": lambda doing, device, fields: doing.describe(device, _described(fields)),
}
"""Changes of one device."""
sessions = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
forms = APIRouter(
    route_class=ChangeRoute,
    include_in_schema=False,
    default_response_class=HTMLResponse,
    dependencies=[Depends(require(Role.OPERATOR))],
)
own_forms = APIRouter(route_class=ChangeRoute, include_in_schema=False, dependencies=[Depends(require(Role.VIEWER))])


@sessions.get("/login")
def login_form(request: Request, to: str = "/") -> Response:
    """The form for a token, and a link to the provider if one is set."""
    return plain_page("login.html", to=own_path(to), problem="", oidc=access_of(request).oidc)


@sessions.post("/login")
async def login(request: Request, fields: Fields) -> Response:
    """Open a session with an API token."""
    to = own_path(fields.get("to", "/"))
    try:
        session = await access_of(request).sign_in(fields.get("token", ""), request)
    except ProblemError as error:
        return plain_page("login.html", error.status, to=to, problem=error.detail, oidc=access_of(request).oidc)
    answer = see_other(to)
    set_session(answer, session, secure=request.url.scheme == "https")
    return answer


@sessions.get(FLOW_PATH)
async def begin_oidc(request: Request, to: str = "/") -> Response:
    """Redirect to the OpenID Connect provider."""
    url, flow = await access_of(request).oidc.begin(own_path(to))
    answer, secure = see_other(url), request.url.scheme == "https"
    answer.set_cookie(FLOW_COOKIE, flow, FLOW_S, path=FLOW_PATH, secure=secure, httponly=True, samesite="lax")
    return answer


@sessions.get(CALLBACK)
async def finish_oidc(request: Request) -> Response:
    """Open a session after the provider's redirect. A page leads on: browsers send its strict cookie only from a page of this site."""
    session, to = await access_of(request).finish_oidc(request)
    answer = plain_page("signed_in.html", to=own_path(to))
    set_session(answer, session, secure=request.url.scheme == "https")
    return answer


@sessions.post("/logout")
async def logout(view: Asked) -> Response:
    """End the session."""
    answer = see_other("/login")
    await access_of(view.request).sign_out(view.request)
    end_session(answer)
    return answer


@own_forms.post("/sessions/{session}/end")
def end_open_session(session: str, view: Asked) -> Response:
    """End an open session."""
    access_of(view.request).end_session(session, view.identity)
    return see_other("/sessions")


@forms.post("/enrolment")
def make_token(view: Asked, fields: Fields) -> Response:
    """Create an enrolment token and show it once; for a range of ids, create one for each as a CSV file."""
    data, device = fields.get("data", ""), fields.get("device") or None
    if len(data) > MAX_PATH or not data.isprintable():
        raise EnrolmentError(f"images: a path of at most {MAX_PATH} characters")
    replaces = device or "" if fields.get("replaces") == "yes" else None
    asked = {"device": device, "replaces": replaces, "federation": fields.get("federation") or None}
    try:
        wanted = WantedToken.model_validate(
            asked | {"hours": plain_value(fields.get("hours", "24"))} | _described(fields)
        )
    except ValidationError as error:
        raise EnrolmentError(problems_in_words(error, WantedToken)) from error
    if device and ".." in device:
        made = operations_of(view.request).create_enrolment_tokens(wanted)
        text = tokens_csv([made_token(*each, data).model_dump() for each in made])
        return Response(text, 200, {"Content-Disposition": 'attachment; filename="tokens.csv"'}, "text/csv")
    token = made_token(*operations_of(view.request).create_enrolment_token(wanted), data)
    view.recent.clear()
    return view.render("enrolment.html", **enrolment_values(view), made=token, code=qr_code(token.line))


@forms.post("/enrolment/{token}/delete")
def delete_token(token: str, view: Asked) -> Response:
    """Revoke an enrolment token."""
    operations_of(view.request).revoke_enrolment_token(token)
    return view.changed("/enrolment")


@forms.post("/notifications/{channel}/test")
def test_channel(channel: str, view: Asked) -> Response:
    """Send a test to a channel; the screen shows its outcome."""
    view.request.app.state.notifier.test(channel, view.known)
    return see_other("/notifications")


@forms.post("/devices")
def change_devices(view: Asked, fields: Fields) -> Response:
    """Change several devices, and show what happened to each. The form has a field `device:ID` for each, so that the audit log names all."""
    action, results, is_pending = fields.get("action", ""), dict[str, str](), False
    change = _known(BULK, action)
    for device in (name.removeprefix("device:") for name in fields if name.startswith("device:")):
        try:
            results[device] = ""
            done = change(operations_of(view.request), device, fields)
            is_pending |= isinstance(done, Revoked) and not done.broker_reloaded
        except SteeringError as error:  # noqa: PERF203 - each device has its own result
            results[device] = str(error)
    view.recent.clear()
    values: dict[str, Any] = {
        "label": fields.get("label", ""),
        "results": results,
        "note": NOT_APPLIED if is_pending else "",
    }
    return view.render("confirm_devices.html", action=action, chosen=[], **values)


@forms.post("/devices/{device}/{action}")
def change_device(device: str, action: str, view: Asked, fields: Fields) -> Response:
    """Disable, enable, readmit or describe a device."""
    _known(OF_DEVICE, action)(operations_of(view.request), device, fields)
    return view.changed(own_path(fields.get("to") or f"/devices/{device}"))


@sessions.post("/federations/new/plan")
def show_plan(view: Asked, fields: Fields) -> Response:
    """The form with the plan that its fields make. Nothing is created."""
    text = plan_text_of(fields)
    problems: list[str] = []
    try:
        read_plan(PLAN, complete=lambda _: (0, ""), text=text)
    except PlanError as error:
        problems = str(error).split("\n  ")[1:]
    return plan_page(view, text, fields, problems)


@forms.post("/federations/new")
async def create_federation(request: Request, view: Asked, fields: Fields) -> Response:
    """Create a federation from a plan, and start it if requested."""
    text = plan_text_of(fields)

    def create() -> Response:
        operations = operations_of(request)
        try:
            plan = read_plan(PLAN, complete=operations.complete, text=text)
            source, starts = fields.get("continued_from") or None, fields.get("start") == "yes"
            federation = operations.create_federation(plan, start=starts, continued_from=source).id
        except PlanError as error:
            problems = str(error).split("\n  ")
            return plan_page(view, text, fields, numbered(text, problems[1:] or problems), 422)
        return view.changed(f"/f/{federation}")

    return await in_turn(request, create)


@forms.post("/f/{federation}/models/{number}/pin")
def pin_model(federation: str, number: int, view: Asked, fields: Fields) -> Response:
    """Pin a version under a label, or unpin it without one."""
    operations_of(view.request).pin(federation, number, fields.get("label") or None)
    return view.changed(f"/f/{federation}/models")


@forms.post("/f/{federation}/policy")
def change_policy(federation: str, view: Asked, fields: Fields) -> Response:
    """Change the policy: the fields whose values differ from the present ones."""
    known = view.known.federation(federation).policy.model_dump()
    given = {name: text for name, text in fields.items() if name in known}
    changes = {name: value for name, text in given.items() if (value := plain_value(text)) != known[name]}
    try:
        if changes:
            operations_of(view.request).change_policy(federation, changes, unchanged(federation, fields.get("tag", "")))
    except (SteeringError, ProblemError) as error:
        old = (
            {"tag": fields.get("tag", "")} if isinstance(error, ProblemError) else {}
        )  # not to be saved over others' changes
        return _policy_page(view, federation, given | old, str(error).split("\n  ")[1:] or [str(error)], 422)
    return view.changed(f"/f/{federation}/policy")


@forms.post("/federations/{federation}/{action}")
def steer(federation: str, action: str, view: Asked, fields: Fields) -> Response:
    """Start, pause, resume, stop, archive or extend a federation, or change its policy."""
    _known(CHANGES, action)(operations_of(view.request), federation, fields)
    return view.changed(own_path(fields.get("to") or "/federations"))


def _known(changes: Mapping[str, Change], action: str) -> Change:
    if action not in changes:
        raise SteeringError(f"{action!r} is not a change here; choose one of {', '.join(changes)}")
    return changes[action]


def _described(fields: Mapping[str, str]) -> dict[str, object]:
    """What a form changes: fields that differ from what it showed, if it says that."""
    names = [name for name in ("labels", "site", "note") if name in fields]
    changed = {name: fields[name] for name in names if fields[name] != fields.get(f"was_{name}")}
    words = {"labels": changed.pop("labels").replace(",", " ").split()} if "labels" in changed else {}
    return {**words, **changed}


def _rounds(fields: Mapping[str, str]) -> int:
    """The number of rounds to add."""
    rounds = fields.get("rounds", "")
    if not (rounds.isascii() and rounds.isdigit() and len(rounds) < 6):
        raise SteeringError(f"rounds = {rounds!r}: enter the number of rounds to add, as a whole number")
    return int(rounds)
