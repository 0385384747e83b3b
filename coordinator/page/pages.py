"""The screens: each one a URL that shows facts."""

from __future__ import annotations

import csv
import io
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Response
from fastapi.responses import HTMLResponse

from coordinator.facts.current_round import current_round
from coordinator.facts.devices import DeviceFacts, device_facts, device_history, in_order
from coordinator.facts.known import Known
from coordinator.facts.models import model_versions, served_models
from coordinator.facts.problems import Problem, open_problems
from coordinator.facts.sent import sent
from coordinator.facts.tokens import token_facts
from coordinator.facts.worth import worth
from coordinator.operations.create_federation import example_plan
from coordinator.page.views import PageRoute, View, plain_page, view_of
from coordinator.rounds.records import FederationStatus
from coordinator.storage.event_store import Event, EventFilter

PER_PAGE = 100
SHOWN_CLIENTS = 100
SHOWN_EVENTS = 200
PER_KIND = 20
ON_NOW = 8
PRESENCE_DAYS = (1, 7, 90)
SORTS = {"device": "id", "state": "standing", "seen": "seen_at", "certificate": "certificate_days"}
SORTS |= {name: name for name in ("health", "agent", "accuracy")}
"""Fields of a device by the names of the columns that the page sorts."""
STATES = ("online", "offline", "disabled", "revoked", "left")
COLUMNS = {"device": "id", "state": "standing"}
COLUMNS |= {name: name for name in ("online", "enrolled_at", "seen_at", "agent", "health", "certificate_days")}
COLUMNS |= {name: name for name in ("accuracy", "last_round", "remarks")}
"""Fields of a device by the columns of its table for a spreadsheet."""
Asked = Annotated[View, Depends(view_of)]
router = APIRouter(route_class=PageRoute, include_in_schema=False, default_response_class=HTMLResponse)


@router.get("/")
def front(view: Asked) -> Response:
    """The federation that runs, or how to make one."""
    federations = view.known.store.shown_federations()
    if not federations:
        return view.render("empty.html")
    running = [each for each in federations if each.id in view.known.services]
    return now((running or federations)[-1].id, view)


@router.get("/f/{federation}")
def now(federation: str, view: Asked) -> Response:
    """A federation now."""
    facts = view.facts(current_round, federation)
    recent = view.facts(_recent_events, federation)
    return view.render(
        "now.html", federation=federation, is_same_for_all=True, facts=facts, recent=recent, shown=SHOWN_CLIENTS
    )


@router.get("/f/{federation}/worth")
def is_it_worth_it(federation: str, view: Asked) -> Response:
    """Accuracies, and who is worse off than alone."""
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
    """The same in full, as one file for the privacy officer."""
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


@router.get("/devices.csv")
def devices_csv(view: Asked, q: str = "", state: str = "", sort: str = "device") -> Response:
    """The same devices as a table for a spreadsheet; an empty cell is unavailable."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(COLUMNS)
    for each in _chosen(view.facts(device_facts), q, state, sort):
        joined = {"online": " ".join(each.online), "remarks": "; ".join(each.remarks)}
        rows.writerow([_cell(joined.get(name, getattr(each, name))) for name in COLUMNS.values()])
    headers = {"Content-Disposition": 'attachment; filename="devices.csv"'}
    return Response(text.getvalue(), 200, headers, "text/csv")


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
    """The last events that fit a filter, as the log's sentences."""
    wanted = EventFilter(event, client, federation, text, level)
    found = view.known.store.events.last(wanted, SHOWN_EVENTS)
    return view.render("events.html", found=found, wanted=wanted, shown=SHOWN_EVENTS)


@router.get("/enrolment")
def enrolment(view: Asked) -> Response:
    """Enrolment tokens."""
    return view.render("enrolment.html", **enrolment_values(view), made=None)


@router.get("/federations")
def federations(view: Asked, archived: bool = False) -> Response:
    """All federations, and how to steer them; archived ones apart."""
    found = [(each.id, each.status is FederationStatus.ARCHIVED) for each in view.known.store.federations()[::-1]]
    every = [view.facts(current_round, name) for name, is_archived in found if is_archived is archived]
    return view.render("federations.html", every=every, archived=archived, others=len(found) - len(every))


@router.get("/federations/new")
def new_federation(view: Asked) -> Response:
    """A form with a commented plan."""
    return view.render("new_federation.html", plan=example_plan(), start=True, problems=[])


@router.get("/confirm/{action}/{name}")
def confirm(action: str, name: str, view: Asked) -> Response:
    """Ask before a change that has a reason: stop or pause a federation, disable a device."""
    return view.render("confirm.html", action=action, name=name)


def enrolment_values(view: View) -> dict[str, Any]:
    """What the enrolment page shows besides a new token: the newest tokens first."""
    tokens = view.known.store.register.tokens()[::-1][:PER_PAGE]
    listener = view.request.app.state.home.config().enrolment_url
    return {"tokens": [token_facts(each, view.known.now) for each in tokens], "listener": listener}


def _recent_events(known: Known, federation: str) -> list[Event]:
    return known.store.events.last(EventFilter(federation=federation, level="info"), ON_NOW)


def _chosen(devices: list[DeviceFacts], text: str, state: str, sort: str) -> list[DeviceFacts]:
    """The devices that fit, in order."""
    wanted = text.lower().strip()
    fit = [each for each in devices if (not state or each.standing == state) and _mentions(each, wanted)]
    return in_order(fit, SORTS.get(sort.removeprefix("-"), "id"), descending=sort.startswith("-"))


def _mentions(device: DeviceFacts, wanted: str) -> bool:
    return not wanted or any(wanted in text.lower() for text in (device.id, device.agent or "", *device.remarks))


def _cell(value: object) -> object:
    """A value that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
