"""The devices: state, presence, answers and updates, and what each one reported of itself: doctor findings, audit figures, privacy budget."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
from fedcg.wire.messages.schemas import DeviceCondition, Readings

LOOK = "On the device: `fedcg doctor` names what is wrong and what to do."
PAUSED = ("its owner has paused it", "Nothing is broken. On the device: `fedcg agent resume` ends the pause.")


@dataclass(frozen=True)
class Finding:
    """What a device's own doctor found: "warning" or "failed", the fact, and the remedy; `at` is when the last report with it came, unix time.

    Attributes:
        federations: those whose agents on the device reported it; each has its own folder, images and cohort secret.
    """

    state: str
    what: str
    remedy: str
    at: float
    federations: tuple[str, ...]


def doctor_findings(known: Known, device: str | None = None) -> dict[str, list[Finding]]:
    """What the doctors of devices, or of one, found, as their agents reported it, what failed first; without those that report none."""
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
                fallback = (f"its check of {one.check}: {one.state}", "")
                what, remedy = texts().findings.get(one.check, {}).get(one.state, fallback)
                of_device[one.state, what, remedy or LOOK].append((record.at, federation.id))
    return {
        name: sorted(
            (Finding(*one, max(told)[0], tuple(sorted(where for _, where in told))) for one, told in of_device.items()),
            key=lambda one: one.state,
        )
        for name, of_device in found.items()
    }


@dataclass(frozen=True)
class ReportedPrivacy:
    """What a device's last update reports, as far as its owner allows it.

    Attributes:
        round: of the update.
        gains: (what was attacked, gain over the best guess at most), in a fixed order.
        spent: in words, e.g. "epsilon 3.2 of 8 at delta 1e-05"; empty where it is not reported.
    """

    round: int
    gains: list[tuple[str, float]]
    spent: str


def reported_privacy(last: UpdateRecord) -> ReportedPrivacy | None:
    """The privacy figures in an update; None where it reports none."""
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


@dataclass(frozen=True)
class CertificateFacts:
    """A TLS certificate of a device; `serial` in hex, times are unix times."""

    serial: str
    issued_at: float
    expires_at: float
    revoked_at: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts(DeviceRecord):
    """A device that is or was enrolled. None means unavailable: the coordinator does not have it now.

    Attributes:
        last_seen_at: unix time; of a device that is online, when it came.
        seen_at: the same, but the present for a device that is online.
        online: the federations in which it has a session.
        participates: the federations whose open attempt it was invited to.
        left_out: by federation, why it is not invited while enough others are there, or at all.
        odd: by federation, what became of its last update where that was unlike the others.
        refused: messages of it that were refused since the coordinator started.
        progress: by federation, how far its training is.
        certificates: all of them, oldest first; `certificate_expires_at` is of the last that is not revoked, `certificate_days` the
            days until then, None for a device that is no member.
        findings: of its own doctor; None where it reports none.
        health, accuracy: from its last update, only while it is online; `last_round` is that update's round.
        remarks: why it is not invited, and other things to look at.
    """

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


@dataclass(frozen=True)
class Stretch:
    """A time in which a device was online, or was not; unix times."""

    start: float
    end: float
    online: bool
    reason: str = ""

    @property
    def state(self) -> str:
        """One of online, offline, and not observed, where the coordinator did not run."""
        seen = "not observed" if self.reason.startswith("the coordinator was ") else "offline"
        return "online" if self.online else seen


@dataclass(frozen=True)
class DeviceHistory:
    """What is kept of one device.

    Attributes:
        answers: by federation, (round, attempt, answer, reason) of the last attempts that invited it, newest first.
        deliveries: by federation, its updates, oldest first.
        points: those of them in the chart: at most one a round, none of a failed attempt.
        presence: by federation, from the oldest on; a gap before the first stretch was not observed.
        classes: by federation, the accuracies by class in its last update, where it reports them.
        privacy: by federation, what its last update reports of its own audit and privacy budget, where it reports that.
        readings: of its sensors, and when they came, unix time; None where it reports none to this process of the coordinator.
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
    """All devices that were ever enrolled, sorted by id."""
    certificates: dict[str, list[CertificateRecord]] = defaultdict(list)
    for certificate in known.store.register.certificates():
        certificates[certificate.device].append(certificate)
    last, live = _last_deliveries(known), _Live.of(known)
    return [
        _facts(known, device, certificates[device.id], last.get(device.id), live) for device in known.store.devices()
    ]


def one_device(known: Known, device: str) -> DeviceFacts:
    """One device.

    Raises:
        NotFoundError: there never was one of that id.
    """
    record = device_of(known.store, device)
    certificates, last = known.store.register.certificates(device), _last_deliveries(known, device).get(device)
    return _facts(known, record, certificates, last, _Live.of(known, device))


def in_order(devices: Sequence[DeviceFacts], field: str, *, descending: bool = False) -> list[DeviceFacts]:
    """Devices sorted by a field and then by id; those that lack the field come last in both directions."""
    there = [each for each in devices if getattr(each, field) is not None]
    there.sort(key=lambda each: (getattr(each, field), each.id), reverse=descending)
    return there + [each for each in devices if getattr(each, field) is None]


def device_history(known: Known, device: str, days: float = 1.0) -> DeviceHistory:
    """One device with its last answers, updates, and its presence of the last days.

    Raises:
        NotFoundError: there never was one of that id.
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
    """The changes in one federation as stretches between two times; a time before the first change is left out."""
    found: list[Stretch] = []
    mine = [change for change in changes if change.federation == federation]
    for number, change in enumerate(mine):
        end = mine[number + 1].at if number + 1 < len(mine) else until
        if end > since:
            found.append(Stretch(max(change.at, since), end, change.online, change.reason))
    return found


@dataclass(frozen=True)
class _Live:
    """What is computed once for all devices: who is silenced for all federations, how far training is in each one, what doctors found."""

    silenced: frozenset[str]
    progress: dict[str, dict[str, DeviceProgress]]
    findings: dict[str, list[Finding]]

    @staticmethod
    def of(known: Known, device: str | None = None) -> _Live:
        progress = {federation: service.progress for federation, service in known.services.items()}
        return _Live(frozenset(silenced_in(Home(known.home))), progress, doctor_findings(known, device))


def _last_deliveries(known: Known, device: str | None = None) -> dict[str, UpdateRecord]:
    """The last update of each device, or of one, whatever its federation and its outcome."""
    last: dict[str, UpdateRecord] = {}
    for record in known.store.federations():
        for client, delivery in known.store.overview.last_deliveries(record.id, device).items():
            if client not in last or delivery.stored_at > last[client].stored_at:
                last[client] = delivery
    return last


def _facts(
    known: Known,
    device: DeviceRecord,
    certificates: Sequence[CertificateRecord],
    last: UpdateRecord | None,
    live: _Live,
) -> DeviceFacts:
    services = known.services
    states = {federation: service.state for federation, service in services.items()}
    online = [federation for federation, state in states.items() if device.id in state.online]
    is_member = device.state is DeviceState.ENROLLED
    present: Standing = "disabled" if device.disabled_at else "online" if online else "offline"
    ended: dict[DeviceState, Standing] = {DeviceState.REVOKED: "revoked", DeviceState.LEFT: "left"}
    expires_at = max((each.expires_at for each in certificates if each.revoked_at is None), default=None)
    report = last.reported if last is not None and online else {}
    left_out = {
        federation: reason
        for federation, state in states.items()
        if (reason := state.barred.get(device.id) or state.left_out.get(device.id))
    }
    return DeviceFacts(
        **asdict(device),
        seen_at=known.now if online else device.last_seen_at,
        standing=ended.get(device.state, present),
        online=online,
        participates=[federation for federation, state in states.items() if device.id in state.participants],
        left_out=left_out,
        odd={
            federation: f"round {odd.round}: {odd.reason}"
            for federation, service in services.items()
            if (odd := service.round_driver.odd.get(device.id)) is not None
        },
        refused=sum(service.refused_of(device.id) for service in services.values()),
        silenced=device.id in live.silenced
        or any(service.floods.is_silenced(device.id) for service in services.values()),
        progress={
            federation: progress
            for federation, board in live.progress.items()
            if (progress := board.get(device.id)) is not None
        },
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
            remarks.append(f"silenced in {federation}: it sent too much")
        if refused := service.refused_of(device.id):
            remarks.append(f"{refused} of its messages to {federation} were refused")
    return remarks
