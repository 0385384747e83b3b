"""Facts about devices: state, presence, answers, updates, and their reports: doctor findings, audit figures, privacy budget."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from coordinator.broker.access_lists import silenced_in
from coordinator.facts.known import Known
from coordinator.facts.models import ClassWorth, by_class
from coordinator.operations.operations import device_of
from coordinator.paths import Home
from coordinator.rounds.records import (
    AttemptState,
    CertificateRecord,
    DeviceRecord,
    DeviceState,
    PresenceRecord,
    UpdateRecord,
)
from coordinator.service.reports import DeviceProgress
from fedcg.sentences import texts
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeviceCondition, Readings

LOOK = "On the device, run `fedcg doctor` to see the problem and its remedy."
PAUSED = ("its owner has paused it", "This is not a fault. On the device, `fedcg agent resume` ends the pause.")


class Finding(Value):
    """A finding of `fedcg doctor` on a device: state ("warning" or "failed"), fact and remedy. `at` is the unix time of the last report.

    Attributes:
        federations: the federations whose agents reported it. Each agent has its own folder, images and cohort secret.
    """

    state: str
    what: str
    remedy: str
    at: float
    federations: tuple[str, ...]


def doctor_findings(known: Known, device: str | None = None) -> dict[str, list[Finding]]:
    """Reported findings of all devices or of one, failed checks first. Devices without a report are omitted."""
    found: dict[str, dict[tuple[str, str, str], list[tuple[float, str]]]] = {}
    for federation in known.store.federations():
        for record in known.store.presence.conditions(federation.id, device):
            condition = DeviceCondition.model_validate_json(record.content)
            if condition.findings is None and condition.paused is None:
                continue
            of_device = found.setdefault(record.device, defaultdict(list))
            if condition.paused:
                of_device[("warning", *PAUSED)].append((record.at, federation.id))
            for one in condition.findings or ():
                fallback = (f"check {one.check}: {one.state}", "")
                what, remedy = texts().findings.get(one.check, {}).get(one.state, fallback)
                of_device[one.state, what, remedy or LOOK].append((record.at, federation.id))
    return {
        name: sorted(
            (Finding(*one, max(told)[0], tuple(sorted(where for _, where in told))) for one, told in of_device.items()),
            key=lambda one: one.state,
        )
        for name, of_device in found.items()
    }


class ReportedPrivacy(Value):
    """Privacy figures in a device's last update, if the owner allows them.

    Attributes:
        round: round of the update.
        gains: (attack, upper bound of its gain over the best guess), in a fixed order.
        spent: privacy budget as text, e.g. "epsilon 3.2 of 8 at delta 1e-05"; empty if not reported.
    """

    round: int
    gains: list[tuple[str, float]]
    spent: str


def reported_privacy(last: UpdateRecord) -> ReportedPrivacy | None:
    """The privacy figures in an update; None if it has none."""
    found = last.reported.get("audit") or {}
    gains = [(title, float(found[name])) for name, title in texts().audit_figures.items() if name in found]
    spent = _in_words(last.reported.get("epsilon"))
    return ReportedPrivacy(last.round, gains, spent) if gains or spent else None


def _in_words(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return ""
    budget = "" if spent.get("budget") is None else f" of {spent['budget']:g}"
    return f"epsilon {spent['epsilon']:.3g}{budget} at delta {spent['delta']:g}"


DAY_S = 86_400.0
Standing = Literal["online", "offline", "disabled", "revoked", "left"]


class CertificateFacts(Value):
    """A TLS certificate of a device; `serial` in hex, times are unix times."""

    serial: str
    issued_at: float
    expires_at: float
    revoked_at: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts(DeviceRecord):
    """A device that is or was enrolled. None means unavailable.

    Attributes:
        last_seen_at: unix time; for an online device, when it came online.
        seen_at: the same, but the present time for an online device.
        online: the federations in which it has a session.
        participates: the federations with an open attempt to which it was invited.
        left_out: by federation, why it is not invited, either at all or while enough other devices are online.
        odd: by federation, the treatment of its last update if that was odd.
        refused: number of its messages refused since the coordinator started.
        progress: by federation, its training progress.
        certificates: all certificates, oldest first. `certificate_expires_at` is the expiry of the last one not revoked,
            `certificate_days` the days until then; None for a device that is not a member.
        findings: findings of `fedcg doctor` on the device; None if it reports none.
        health, accuracy: from its last update, only while it is online; `last_round` is that update's round.
        remarks: why it is not invited, and other points that need attention.
        labels: words that operators gave it, sorted.
        federations: in which it has a session or an invitation, or delivered an update.
        hardware: processor, and cpu or cuda for where it trains, from the header of its last update; None if it sent none.
        images: the number of training images reported with that update.
        is_behind: whether an enrolled device has an agent with a later version number.
    """

    labels: list[str]
    federations: list[str]
    hardware: str | None
    images: int | None
    is_behind: bool
    seen_at: float | None
    standing: Standing
    online: list[str]
    participates: list[str]
    left_out: dict[str, str]
    odd: dict[str, str]
    refused: int
    silenced: bool
    progress: dict[str, DeviceProgress]
    certificate_expires_at: float | None
    certificate_days: float | None
    certificates: list[CertificateFacts]
    findings: list[Finding] | None
    health: str | None
    accuracy: float | None
    last_round: int | None
    remarks: list[str]


class Stretch(Value):
    """A period in which a device was online or was not; unix times."""

    start: float
    end: float
    online: bool
    reason: str = ""

    @property
    def state(self) -> str:
        """One of online, offline and, while the coordinator was stopped, not observed."""
        seen = "not observed" if self.reason.startswith("the coordinator was ") else "offline"
        return "online" if self.online else seen


class DeviceHistory(Value):
    """The history of one device.

    Attributes:
        answers: by federation, (round, attempt, answer, reason) of the last attempts that invited it, newest first.
        deliveries: by federation, its updates, oldest first.
        points: the updates shown in the chart: at most one per round, none from failed attempts.
        presence: by federation, oldest first; time before the first stretch was not observed.
        classes: by federation, the accuracies by class in its last update, if reported.
        privacy: by federation, audit figures and privacy budget in its last update, if reported.
        readings: unix time and values of its last sensor report; None before the first report since the coordinator started.
    """

    facts: DeviceFacts
    answers: dict[str, list[tuple[int, int, str, str]]] = field(default_factory=dict)
    deliveries: dict[str, list[UpdateRecord]] = field(default_factory=dict)
    points: dict[str, list[UpdateRecord]] = field(default_factory=dict)
    presence: dict[str, list[Stretch]] = field(default_factory=dict)
    classes: dict[str, list[ClassWorth]] = field(default_factory=dict)
    privacy: dict[str, ReportedPrivacy] = field(default_factory=dict)
    readings: tuple[float, Readings] | None = None


def device_facts(known: Known) -> list[DeviceFacts]:
    """All devices ever enrolled, sorted by id: line-2 before line-10."""
    certificates: dict[str, list[CertificateRecord]] = defaultdict(list)
    for certificate in known.store.register.certificates():
        certificates[certificate.device].append(certificate)
    last, live = _last_deliveries(known), _Live.of(known)
    found = [_facts(known, each, certificates[each.id], last.get(each.id, {}), live) for each in known.devices]
    return in_order(found, "id")


def one_device(known: Known, device: str) -> DeviceFacts:
    """One device.

    Raises:
        NotFoundError: no device ever had this id.
    """
    record = device_of(known.store, device)
    certificates, last = known.store.register.certificates(device), _last_deliveries(known, device).get(device, {})
    return _facts(known, record, certificates, last, _Live.of(known, device))


def in_order(devices: Sequence[DeviceFacts], field: str, *, descending: bool = False) -> list[DeviceFacts]:
    """Devices sorted by a field, then by id. Devices without the field come last in both directions."""
    there = [each for each in devices if getattr(each, field) is not None]
    there.sort(key=lambda each: (natural(getattr(each, field)), natural(each.id)), reverse=descending)
    return there + [each for each in devices if getattr(each, field) is None]


def natural(value: Any) -> tuple[Any, ...]:
    """A key that sorts numbers in texts by value: line-2 before line-10, 0.9 before 0.10. Other values keep their order."""
    return _pieces(value) if isinstance(value, str) else (value,)


@functools.lru_cache(4096)
def _pieces(text: str) -> tuple[int | str, ...]:
    return tuple(int(piece) if number % 2 else piece for number, piece in enumerate(re.split(r"([0-9]{1,18})", text)))


class DeviceFilter(Value):
    """The devices to show. An empty field matches all.

    Attributes:
        q: part of the id, version, site, note, hardware, a label or a remark, in upper or lower case.
        state: the standing.
        version: of the agent.
        federation: one of the device's `federations`.
    """

    q: str = ""
    state: str = ""
    label: str = ""
    site: str = ""
    version: str = ""
    federation: str = ""

    def of(self, devices: Sequence[DeviceFacts]) -> list[DeviceFacts]:
        """The devices that match all fields."""
        return [each for each in devices if self._matches(each)]

    def choices(self, devices: Sequence[DeviceFacts]) -> dict[str, list[str]]:
        """The values of label, site, version and federation that a device has, and the present ones."""
        found = {name: {getattr(self, name)} for name in ("label", "site", "version", "federation")}
        for each in devices:
            for name, values in _values(each).items():
                found[name].update(values)
        return {name: sorted(values - {""}, key=natural) for name, values in found.items()}

    def _matches(self, device: DeviceFacts) -> bool:
        texts = device.id, device.agent, device.site, device.note, device.hardware, *device.labels, *device.remarks
        is_of = all(not (wanted := getattr(self, name)) or wanted in had for name, had in _values(device).items())
        is_there = self.state in ("", device.standing)
        return is_of and is_there and self.q.lower().strip() in "\n".join(filter(None, texts)).lower()


def _values(device: DeviceFacts) -> dict[str, Sequence[str]]:
    agent = device.agent or ""
    return {"label": device.labels, "site": [device.site], "version": [agent], "federation": device.federations}


def device_history(known: Known, device: str, days: float = 1.0) -> DeviceHistory:
    """One device with its last answers, its updates, and its presence in the last days.

    Raises:
        NotFoundError: no device ever had this id.
    """
    facts = one_device(known, device)
    overview, federations = known.store.overview, [each.id for each in known.store.federations()]
    deliveries = {each: found for each in federations if (found := overview.deliveries(each, device))}
    since = known.now - days * DAY_S
    told = [pair for each in known.services.values() if (pair := each.conditions.readings.get(device)) is not None]
    changes = known.store.presence.before(device, since) + known.store.presence.changes(device, since)
    return DeviceHistory(
        facts,
        {each: asked for each in federations if (asked := overview.answers(each, device))},
        deliveries,
        {each: _points(known, each, found) for each, found in deliveries.items()},
        {each: there for each in federations if (there := stretches(changes, each, since, known.now))},
        {each: by_class(known, each, {device: found[-1]}) for each, found in deliveries.items()},
        {each: seen for each, found in deliveries.items() if (seen := reported_privacy(found[-1])) is not None},
        max(told, key=lambda one: one[0], default=None),
    )


def _points(known: Known, federation: str, found: list[UpdateRecord]) -> list[UpdateRecord]:
    failed = {(one.round, one.attempt) for one in known.store.attempts(federation) if one.state is AttemptState.FAILED}
    return [each for each in found if (each.round, each.attempt) not in failed]


def stretches(changes: list[PresenceRecord], federation: str, since: float, until: float) -> list[Stretch]:
    """The changes in one federation as stretches between two times, without the time before the first change."""
    found: list[Stretch] = []
    mine = [change for change in changes if change.federation == federation]
    for number, change in enumerate(mine):
        end = mine[number + 1].at if number + 1 < len(mine) else until
        if end > since:
            found.append(Stretch(max(change.at, since), end, change.online, change.reason))
    return found


class _Live(Value):
    """Values computed once for all devices: devices silenced for all federations, training progress, doctor findings, labels, newest agent."""

    silenced: frozenset[str]
    progress: dict[str, dict[str, DeviceProgress]]
    findings: dict[str, list[Finding]]
    labels: Mapping[str, list[str]]
    newest: tuple[Any, ...]

    @staticmethod
    def of(known: Known, device: str | None = None) -> _Live:
        progress = {federation: service.progress for federation, service in known.services.items()}
        silenced, labels = frozenset(silenced_in(Home(known.home))), known.store.register.labels(device)
        newest = max((natural(each) for each in known.store.agents() if each[:1].isdigit()), default=())
        return _Live(silenced, progress, doctor_findings(known, device), labels, newest)


def _last_deliveries(known: Known, device: str | None = None) -> dict[str, dict[str, UpdateRecord]]:
    """The last update of each device or of one, with any outcome, by federation."""
    last: defaultdict[str, dict[str, UpdateRecord]] = defaultdict(dict)
    overview, every = known.store.overview, [record.id for record in known.store.federations()]
    found = known.last_updates if device is None else {each: overview.last_deliveries(each, device) for each in every}
    for federation, updates in found.items():
        for client, delivery in updates.items():
            last[client][federation] = delivery
    return last


def _facts(
    known: Known,
    device: DeviceRecord,
    certificates: Sequence[CertificateRecord],
    deliveries: Mapping[str, UpdateRecord],
    live: _Live,
) -> DeviceFacts:
    services = known.services
    states = {federation: service.state for federation, service in services.items()}
    online = [federation for federation, state in states.items() if device.id in state.online]
    is_member = device.state is DeviceState.ENROLLED
    present: Standing = "disabled" if device.disabled_at else "online" if online else "offline"
    ended: dict[DeviceState, Standing] = {DeviceState.REVOKED: "revoked", DeviceState.LEFT: "left"}
    expires_at = max((each.expires_at for each in certificates if each.revoked_at is None), default=None)
    last = max(deliveries.values(), key=lambda each: each.stored_at, default=None)
    participates = [federation for federation, state in states.items() if device.id in state.participants]
    reported, described = ({}, {}) if last is None else (last.reported, last.described)
    report = reported if online else {}
    reasons = {name: state.barred.get(device.id) or state.left_out.get(device.id) for name, state in states.items()}
    left_out = {name: reason for name, reason in reasons.items() if reason}
    odd = {name: each for name, one in services.items() if (each := one.round_driver.odd.get(device.id)) is not None}
    return DeviceFacts(
        **vars(device),
        seen_at=known.now if online else device.last_seen_at,
        standing=ended.get(device.state, present),
        online=online,
        participates=participates,
        left_out=left_out,
        odd={name: f"round {each.round}: {each.reason}" for name, each in odd.items()},
        refused=sum(service.refused_of(device.id) for service in services.values()),
        silenced=device.id in live.silenced
        or any(service.floods.is_silenced(device.id) for service in services.values()),
        progress={name: board[device.id] for name, board in live.progress.items() if device.id in board},
        certificate_expires_at=expires_at,
        certificate_days=(expires_at - known.now) / DAY_S if expires_at is not None and is_member else None,
        certificates=[
            CertificateFacts(each.serial, each.issued_at, each.expires_at, each.revoked_at) for each in certificates
        ],
        findings=live.findings.get(device.id),
        health=report.get("health"),
        accuracy=report.get("accuracy"),
        last_round=None if last is None else last.round,
        remarks=_remarks(known, device, left_out) if is_member else [*filter(None, [device.ended_because])],
        labels=live.labels.get(device.id, []),
        federations=sorted({*online, *participates, *deliveries}),
        hardware=" ".join(filter(None, map(described.get, ("cpu", "device")))) or None,
        images=reported.get("examples"),
        is_behind=is_member and device.agent is not None and natural(device.agent) < live.newest,
    )


def _remarks(known: Known, device: DeviceRecord, left_out: Mapping[str, str]) -> list[str]:
    remarks = [f"disabled: {device.disabled_because or 'no reason given'}"] if device.disabled_at else []
    for federation, service in known.services.items():
        why = left_out.get(federation, "")
        if why and not why.startswith("disabled"):
            remarks.append(f"not invited to {federation}: {why}")
        if (odd := service.round_driver.odd.get(device.id)) is not None:
            remarks.append(f"its update to round {odd.round} of {federation} is {odd.reason}")
        if service.floods.is_silenced(device.id):
            remarks.append(f"silenced in {federation}: it sent too many messages")
        if refused := service.refused_of(device.id):
            remarks.append(f"{refused} of its messages in {federation} were refused")
    return remarks
