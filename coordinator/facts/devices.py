"""The devices: where they stand, their presence over time, and what each one answered and delivered."""

from __future__ import annotations

from dataclasses import dataclass, field

from coordinator.errors import NotFoundError
from coordinator.facts.conditions import Finding, doctor_findings
from coordinator.facts.known import Known
from coordinator.facts.privacy import ReportedPrivacy, reported_privacy
from coordinator.facts.worth import ClassWorth, by_class
from coordinator.rounds.records import AttemptState, DeviceRecord, DeviceState
from coordinator.storage.overview_store import Delivery, Validity
from coordinator.storage.presence_store import PresenceRecord
from fedcg.wire.messages.conditions import Readings

DAY_S = 86_400.0


@dataclass(frozen=True)
class DeviceFacts:
    """A device as a view shows it. None means unavailable: the coordinator does not have it now.

    Attributes:
        state: online | offline | disabled | revoked | left.
        seen_at: when it was last seen, the present for one that is online; unix time.
        health: from its last report, only while it is online.
        certificate_days: until its certificate ends; None for one that holds none of this register.
        last_round: of its last update.
        remarks: why it is not invited, and other things to look at.
    """

    device: str
    state: str
    online: list[str]
    enrolled_at: float
    seen_at: float | None
    agent: str | None
    health: str | None
    certificate_days: float | None
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
        findings: of its own doctor; None where it reports none.
        readings: of its sensors, and when they came, unix time; None where it reports none to this process of the coordinator.
    """

    facts: DeviceFacts
    record: DeviceRecord
    answers: dict[str, list[tuple[int, int, str, str]]] = field(default_factory=dict)
    deliveries: dict[str, list[Delivery]] = field(default_factory=dict)
    points: dict[str, list[Delivery]] = field(default_factory=dict)
    presence: dict[str, list[Stretch]] = field(default_factory=dict)
    classes: dict[str, list[ClassWorth]] = field(default_factory=dict)
    privacy: dict[str, ReportedPrivacy] = field(default_factory=dict)
    findings: list[Finding] | None = None
    readings: tuple[float, Readings] | None = None


def device_facts(known: Known) -> list[DeviceFacts]:
    """All devices that were ever enrolled, sorted by id."""
    ends = known.store.overview.certificates()
    last: dict[str, Delivery] = {}
    for record in known.store.federations():
        for client, delivery in known.store.overview.last_deliveries(record.id).items():
            if client not in last or delivery.stored_at > last[client].stored_at:
                last[client] = delivery
    return [_facts(known, device, ends.get(device.id), last.get(device.id)) for device in known.store.devices()]


def device_history(known: Known, device: str, days: float = 1.0) -> DeviceHistory:
    """One device with its last answers, updates, and its presence of the last days.

    Raises:
        NotFoundError: there never was one of that id.
    """
    record = known.store.device(device)
    if record is None:
        raise NotFoundError(f"there is no device {device!r}; `fedcg device list` has all")
    overview, federations = known.store.overview, [each.id for each in known.store.federations()]
    deliveries = {each: found for each in federations if (found := overview.deliveries(each, device))}
    newest = max((found[-1] for found in deliveries.values()), key=lambda each: each.stored_at, default=None)
    validity = overview.certificates().get(device)
    since = known.now - days * DAY_S
    told = [pair for each in known.services.values() if (pair := each.conditions.readings.get(device)) is not None]
    changes = known.store.presence.before(device, since) + known.store.presence.changes(device, since)
    return DeviceHistory(
        _facts(known, record, validity, newest),
        record,
        {each: asked for each in federations if (asked := overview.answers(each, device))},
        deliveries,
        {each: _points(known, each, found) for each, found in deliveries.items()},
        {each: there for each in federations if (there := stretches(changes, each, since, known.now))},
        {each: by_class(known, each, {device: found[-1]}) for each, found in deliveries.items()},
        {each: seen for each, found in deliveries.items() if (seen := reported_privacy(found[-1])) is not None},
        doctor_findings(known, device),
        max(told, key=lambda one: one[0], default=None),
    )


def _points(known: Known, federation: str, found: list[Delivery]) -> list[Delivery]:
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


def _facts(known: Known, device: DeviceRecord, validity: Validity | None, last: Delivery | None) -> DeviceFacts:
    online = [name for name, service in known.services.items() if device.id in service.state.online]
    is_member = device.state is DeviceState.ENROLLED
    state = (
        device.state.value if not is_member else "disabled" if device.disabled_at else "online" if online else "offline"
    )
    report = last.report if last is not None and online else {}
    return DeviceFacts(
        device=device.id,
        state=state,
        online=online,
        enrolled_at=device.enrolled_at,
        seen_at=known.now if online else device.last_seen_at,
        agent=device.agent,
        health=report.get("health"),
        certificate_days=(validity.expires_at - known.now) / DAY_S if validity is not None and is_member else None,
        accuracy=report.get("accuracy"),
        last_round=None if last is None else last.round,
        remarks=_remarks(known, device) if is_member else [device.ended_because] if device.ended_because else [],
    )


def _remarks(known: Known, device: DeviceRecord) -> list[str]:
    remarks = [f"disabled: {device.disabled_because or 'no reason given'}"] if device.disabled_at else []
    for federation, service in known.services.items():
        why = service.state.barred.get(device.id) or service.state.left_out.get(device.id)
        if why and not why.startswith("disabled"):
            remarks.append(f"not invited to {federation}: {why}")
        if (odd := service.round_driver.odd.get(device.id)) is not None:
            remarks.append(f"its update to round {odd.round} of {federation} is {odd.reason}")
        if service.floods.is_silenced(device.id):
            remarks.append(f"silenced in {federation}: it sent too much")
        if refused := service.refused_of(device.id):
            remarks.append(f"{refused} of its messages to {federation} were refused")
    return remarks
