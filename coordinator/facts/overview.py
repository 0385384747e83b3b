"""Facts about everything: all federations in short, and what matches a search."""

import re
from dataclasses import replace

from coordinator.facts.devices import DeviceFilter, device_facts
from coordinator.facts.federations import CurrentRound, current_round
from coordinator.facts.known import Known
from coordinator.facts.models import served_models
from coordinator.facts.problems import open_problems
from coordinator.rounds.records import FederationStatus
from fedcg.values import Value

MAX_ROUNDS = 100
"""Closed rounds in `FederationSummary.accuracy`."""
MAX_FOUND = 50
"""Results of each kind."""
MIN_HEX = 4
"""Shortest prefix of a sha256 that is searched for."""


class FederationSummary(Value):
    """A federation in short.

    Attributes:
        now: its present state, without its clients.
        accuracy: (round, mean personal accuracy, mean local-only accuracy) of the last closed rounds.
        problems: number of open problems of this federation.
    """

    now: CurrentRound
    accuracy: list[tuple[int, float | None, float | None]]
    problems: int


def summaries(known: Known, archived: bool = False) -> list[FederationSummary]:
    """The federations that are not archived, or those that are; newest first."""
    subjects = [problem.subject for problem in open_problems(known)]
    found = []
    for record in known.store.federations()[::-1]:
        if (record.status is FederationStatus.ARCHIVED) is archived:
            problems = sum(each == record.id or each.endswith(f" in {record.id}") for each in subjects)
            now, means = replace(current_round(known, record.id), clients=[]), known.store.overview.means(record.id)
            found.append(FederationSummary(now, means[-MAX_ROUNDS:], problems))
    return found


class Found(Value):
    """A result of a search.

    Attributes:
        kind: federation, device, model or exported model.
        name: id of the federation or device; federation and round of a model; device and version of an exported model.
        path: of the screen that shows it.
        what: what it is, and what the device reports about it.
    """

    kind: str
    name: str
    path: str
    what: str


def search(known: Known, text: str) -> list[Found]:
    """Federations, devices, rounds and exported models that match a text; at most `MAX_FOUND` of each kind.

    Args:
        known: the sources.
        text: part of an id, of what `DeviceFilter.q` covers, a number of a round or version, or the start of an artifact's sha256.
    """
    wanted = text.strip().lower()
    if not wanted:
        return []
    devices, federations, models, exported = [], [], [], []
    for one in DeviceFilter(wanted).of(device_facts(known)):
        what = ", ".join([one.standing, *filter(None, [one.site]), *one.labels])
        devices.append(Found("device", one.id, f"/devices/{one.id}", what))
    for record in known.store.federations():
        place = f"/f/{record.id}"
        if wanted in record.id or _fits(wanted, record.spec):
            federations.append(Found("federation", record.id, place, f"{record.status.value}, {record.method}"))
        for made in known.store.aggregates(record.id):
            if _fits(wanted, made.artifact, round=made.round):
                name = f"{record.id}, round {made.round}"
                models.append(Found("model", name, f"{place}/models#v-{made.round}", made.artifact))
        for each in served_models(known, record.id):
            model = each.model
            if wanted == each.device or _fits(wanted, "", version=int(model.version), round=model.round):
                name, what = f"{each.device}, version {model.version}", f"{record.id}, round {model.round}"
                exported.append(Found("exported model", name, f"{place}/models#m-{each.device}", what))
    return [each for kind in (federations, devices, models, exported) for each in kind[:MAX_FOUND]]


def _fits(wanted: str, artifact: str, **numbers: int) -> bool:
    """Whether a text is the start of an artifact's sha256 or one of these numbers, with or without its name."""
    texts = {text for name, number in numbers.items() for text in (f"{number}", f"{name} {number}")}
    is_start = len(wanted) >= MIN_HEX and artifact.startswith(wanted)
    return is_start or re.sub(r"\b0+(?=[0-9])", "", wanted) in texts
