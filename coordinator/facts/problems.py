"""Open problems with their remedies, for the page, `fedcg coordinator status --check`, metrics and notifications.

Based only on the coordinator's own data: its disk and links, the register, and reports and answers of devices. A device clock outside
its certificate's validity fails in the TLS handshake, before any report; `fedcg doctor` on the device explains it.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import field, replace
from functools import cache
from types import MappingProxyType

from coordinator.facts.known import Known
from coordinator.rounds.engine import WAITS_FOR_OWNERS, Phase, RoundState
from coordinator.rounds.records import FederationRecord, FederationStatus, ParticipantRecord, ParticipantState
from coordinator.service.service import Service
from coordinator.updates.robustness import is_tolerated
from fedcg.learning.spec import MAX_DEADLINE_S
from fedcg.sentences import COHORT_ADVICE, texts
from fedcg.values import Value
from fedcg.wire.messages.schemas import DeclineReason, DeviceCondition, Outcome, SumObstacle

FREE_SHARE, FREE_BYTES = 0.05, 2 * 1024**3
"""The coordinator's disk is nearly full if free space is below both."""
CERTIFICATE_SHARE = 0.25
"""Agents renew in the last third of a certificate's life. With less than this share left, renewal is overdue."""
DOUBLED_S = 600.0
"""How long a duplicate identity is reported after its last sign: two reports, which agents send every five minutes."""
CLOCK_S = 60.0
"""Accepted difference between a device's clock and the coordinator's."""
GONE_S = 3600.0
WAITED_S = 60.0
"""Offline for longer, a device that an open round waits for is a problem."""
"""A device of a running federation is reported once it has been offline for longer than this."""

MOST_REPAIRS = 5
"""Most devices that one problem suggests to enable."""

_NAMES = {DeclineReason.DIVERGED: "training diverged", DeclineReason.PAUSED: "paused by its owner"}


def _kind(reason: DeclineReason) -> str:
    """The kind of problem for a decline with this reason."""
    is_unavailable = reason.passes or reason is DeclineReason.NO_TIME
    return "device not available" if is_unavailable else _NAMES.get(reason, reason.value.replace("_", " "))


@cache
def remedies() -> dict[str, tuple[str, str]]:
    """Kind and remedy of the problem, by reason of a decline."""
    declined = texts().declined
    return {one.value: (_kind(one), f"{declined[one][:1].upper()}{declined[one][1:]}.") for one in DeclineReason}


SEVERE = frozenset({"disk", "link lost", "stalled", "waits for owners", "too few devices"})
"""The kinds of problems that always block rounds."""


class Repair(Value):
    """An operation of the coordinator that may solve a problem.

    Attributes:
        operation: a key of `operations` in `sentences.toml`.
        target: the federation or device that it changes.
        arguments: suggested arguments, by name.
        name, effect: what it is called, and what it does.
        command: the same as a command.
    """

    operation: str
    target: str
    arguments: Mapping[str, float] = field(default_factory=dict)
    name: str = field(init=False)
    effect: str = field(init=False)
    command: str = field(init=False)

    def __post_init__(self) -> None:
        name, effect, command = texts().operations[self.operation]
        words = [command.format(target=self.target), *(f"{key}={value:.12g}" for key, value in self.arguments.items())]
        for attribute, value in (("name", name), ("effect", effect), ("command", " ".join(words))):
            object.__setattr__(self, attribute, value)


class Problem(Value):
    """Something that a person should fix.

    Attributes:
        kind: a short fixed name, e.g. "link lost".
        subject: the federation, the device, or "coordinator".
        what: the fact.
        remedy: what to do.
        is_severe: whether it blocks rounds.
        device: the affected device, if there is one.
        repairs: operations of the coordinator that may solve it; empty if only work elsewhere does.
        docs: the section of the documentation about this kind.
    """

    kind: str
    subject: str
    what: str
    remedy: str
    is_severe: bool = False
    device: str | None = None
    repairs: tuple[Repair, ...] = ()
    docs: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "docs", f"docs/reference/problems.md#{self.kind.replace(' ', '-')}")

    @property
    def key(self) -> str:
        """Identifies the problem while it is open."""
        return f"{self.kind}: {self.subject}"


def _problem(
    kind: str,
    subject: str,
    fields: Mapping[str, object] = MappingProxyType({}),
    *,
    remedy: str = "",
    is_severe: bool = False,
    device: str | None = None,
    repairs: tuple[Repair, ...] = (),
) -> Problem:
    """A problem with the text from `sentences.toml`; `remedy` replaces the remedy from there."""
    what, usual = texts().problems[kind]
    fields = {**fields, "subject": subject, "device": device}
    severe = is_severe or kind in SEVERE
    return Problem(kind, subject, what.format(**fields), remedy or usual.format(**fields), severe, device, repairs)


def open_problems(known: Known) -> list[Problem]:
    """All open problems, severe ones first."""
    found = [*_of_coordinator(known), *_of_devices(known)]
    for record in known.store.federations():
        if record.status in (FederationStatus.RUNNING, FederationStatus.PAUSED):
            found += _of_federation(known, record)
    members = {device.id for device in known.members}
    unique = {each.key: each for each in found if each.device is None or each.device in members}
    return sorted(unique.values(), key=lambda each: (not each.is_severe, each.kind, each.subject))


def _of_devices(known: Known) -> Iterator[Problem]:
    ends = known.store.overview.certificates()
    for device in known.members:
        validity = ends.get(device.id)
        if validity is not None:
            life = (validity.expires_at - known.now) / max(1.0, validity.expires_at - validity.issued_at)
            yield from _of_certificate(device.id, life)
        signs = [service.conditions.doubled_at.get(device.id, 0.0) for service in known.services.values()]
        if known.now - max(signs, default=0.0) < DOUBLED_S:
            about, repairs = {"minutes": DOUBLED_S / 60}, (Repair("replace", device.id),)
            yield _problem("two devices with one identity", device.id, about, device=device.id, repairs=repairs)


def _of_certificate(device: str, life: float) -> Iterator[Problem]:
    """Problems of a device's certificate with this share of its life left."""
    if life <= 0:
        yield _problem("certificate ended", device, device=device, repairs=(Repair("replace", device),))
    elif life < CERTIFICATE_SHARE:
        yield _problem("certificate near its end", device, {"life": life}, device=device)


def _of_coordinator(known: Known) -> Iterator[Problem]:
    disk = shutil.disk_usage(known.home)
    if disk.free < FREE_BYTES and disk.free / disk.total < FREE_SHARE:
        sizes = {"free": disk.free / 1024**2, "total": disk.total / 1024**3}
        yield _problem("disk", "coordinator", {**sizes, "home": known.home})


def _of_federation(known: Known, record: FederationRecord) -> Iterator[Problem]:
    service, state = known.services.get(record.id), known.state(record.id)
    if service is not None and not service.is_connected:
        yield _problem("link lost", record.id)
    if state.phase is Phase.STALLED:
        last, repairs = known.store.last_attempt(record.id), [Repair("resume", record.id)]
        if last is not None and (last.closed_at or 0.0) >= last.deadline_at:
            repairs.append(_more_time(record))
        yield _problem("stalled", record.id, {"reason": state.reason}, repairs=tuple(repairs))
    if (
        state.phase is Phase.WAITING
        and state.attempt > state.first_attempt
        and record.status is FederationStatus.RUNNING
    ):
        about = {"attempt": state.attempt - 1, "round": state.round, "reason": state.reason}
        yield _problem("attempt failed", record.id, about, repairs=(Repair("resume", record.id),))
    if state.label == WAITS_FOR_OWNERS:
        unapproved = ", ".join(sorted(state.unapproved))
        yield _problem("waits for owners", record.id, {"round": state.round, "devices": unapproved})
    yield from _of_clients(known, record, state, service)


def _of_clients(
    known: Known, record: FederationRecord, state: RoundState, service: Service | None
) -> Iterator[Problem]:
    last = known.store.last_attempt(record.id)
    if last is not None:
        rejected = {each.client for each in known.store.updates(record.id, last.at) if each.outcome is Outcome.REJECTED}
        for person in known.store.participants(record.id, last.at):
            if person.state is ParticipantState.DECLINED and not _goes_on(known, record.id, person):
                ended = texts().ended["update rejected" if person.client in rejected else "dropped"]
                kind, remedy = remedies().get(person.reason, ended)
                verb = "declined" if person.reason in remedies() else f"{kind} in"
                what = f"{verb} round {last.round} of {record.id}: {person.reason.replace('_', ' ')}"
                remedy = remedy.format(federation=record.id)
                subject = f"{person.client} in {record.id}"
                repairs: tuple[Repair, ...] = ()
                if person.reason == DeclineReason.NO_TIME.value:
                    repairs = (_more_time(record),)
                elif person.client in rejected:
                    repairs = (Repair("disable", person.client),)
                yield Problem(kind, subject, what, remedy, device=person.client, repairs=repairs)
    if service is None:
        return
    yield from _of_sessions(known, record, state, service)


def _more_time(record: FederationRecord) -> Repair:
    return Repair("set", record.id, {"deadline_s": min(MAX_DEADLINE_S, 2 * record.policy.deadline_s)})


def _goes_on(known: Known, federation: str, person: ParticipantRecord) -> bool:
    """Whether a device that declined because its owner had paused it now reports that it is no longer paused."""
    if person.reason != DeclineReason.PAUSED.value:
        return False
    reports = known.store.presence.conditions(federation, person.client)
    latest = [DeviceCondition.model_validate_json(report.content) for report in reports]
    return any(one.findings is not None and not one.paused for one in latest)


def _of_sessions(known: Known, record: FederationRecord, state: RoundState, service: Service) -> Iterator[Problem]:
    for device, reason in service.invitations.waits.items():
        if reason in remedies():
            kind, remedy = remedies()[reason]
            waits = "it joins when its owner approves" if device in state.unapproved else "the round waits for it"
            what = f"can't join round {state.round} of {record.id} yet: {reason.replace('_', ' ')}; {waits}"
            remedy = remedy.format(federation=record.id)
            yield Problem(kind, f"{device} in {record.id}", what, remedy, device=device)
    if state.phase is Phase.WAITING and len(state.candidates) < state.policy.quorum and service.is_connected:
        yield _too_few_devices(known, record.id, state)
    for device, reason in state.left_out.items():
        subject, repairs = f"{device} in {record.id}", (Repair("readmit", device),)
        yield _problem("left out", subject, {"reason": reason}, device=device, repairs=repairs)
    for device, update in service.round_driver.odd.items():
        if not is_tolerated(update.reason):
            about = {"round": update.round, "reason": update.reason}
            subject, off = f"{device} in {record.id}", (Repair("disable", device),)
            yield _problem("odd update", subject, about, device=device, repairs=off)
    outsiders = service.cohorts.outsiders()
    if len(outsiders) < len(state.online):  # else no device has a secret, which is not a problem
        for device, why in outsiders.items():
            yield Problem("cohort differs", f"{device} in {record.id}", why, f"{COHORT_ADVICE}.", device=device)
    if (failure := service.sums.failure) is not None:
        lost = texts().lost_sums.get(failure.ended or "", texts().lost_sums["other"])
        remedy = "" if set(service.sums.refused.values()) - {SumObstacle.SHOWN} else lost
        about = {"round": failure.round, "reason": failure.reason}
        yield _problem("no sealed sum", record.id, about, remedy=remedy)
    for device, why in sorted(service.sums.refused.items()):
        if why is not SumObstacle.SHOWN:  # concerns the list: all its devices refuse
            what, remedy = texts().sum_obstacles[why.value]
            yield Problem("in no sum", f"{device} in {record.id}", what, remedy, device=device)
    yield from _of_devices_ahead(record, state, service)
    yield from _of_reports(record.id, state, service)
    yield from _of_devices_away(known, record, state)


def _too_few_devices(known: Known, federation: str, state: RoundState) -> Problem:
    bounds, there = ("min_clients", "min_cohort"), len(state.candidates)
    lower = " ".join(f"{name}=N" for name in bounds if getattr(state.policy, name) > there)
    absent = [device for device in known.members if device.id not in state.candidates]
    names = f"; missing: {_named([device.id for device in absent])}" if absent else ""
    repairs = [Repair("enable", device.id) for device in absent if device.disabled_at is not None][:MOST_REPAIRS]
    if 0 < there >= state.policy.min_cohort:  # a lower min_cohort exposes devices: no button suggests that
        repairs.append(Repair("set", federation, {"min_clients": there}))
    about = {"there": there, "quorum": state.policy.quorum, "lower": lower, "missing": names}
    return _problem("too few devices", federation, about, repairs=tuple(repairs))


def _of_devices_away(known: Known, record: FederationRecord, state: RoundState) -> Iterator[Problem]:
    """Devices that have been offline for long, and devices in bad condition."""
    for device, change in known.store.presence.latest(record.id).items():
        away, subject = 0.0 if change.online else known.now - change.at, f"{device} in {record.id}"
        about = {"hours": away / 3600, "round": state.round, "reason": change.reason or "reason unknown"}
        if away > WAITED_S and state.phase is Phase.COLLECTING and device in state.awaited:
            yield _problem("round waits", subject, about, device=device, repairs=(Repair("disable", device),))
        elif away > GONE_S and state.phase is not Phase.FINISHED:
            yield _problem("device away", subject, about, device=device)
    for device, delivery in known.last_updates.get(record.id, {}).items():
        health = str(delivery.reported.get("health"))
        if (advice := texts().health.get(health)) and device in state.online:
            what = f"reported {health.replace('_', ' ')} with its update to round {delivery.round}"
            yield Problem("device health", f"{device} in {record.id}", what, advice, device=device)


def _of_devices_ahead(record: FederationRecord, state: RoundState, service: Service) -> Iterator[Problem]:
    """Devices that know a later epoch or round than this coordinator, because its state is older."""
    remembered = sorted(
        item for item in dict(service.conditions.remembered).items() if item[0] in state.opening.expected
    )
    if refusing := [device for device, (_, _, has_key) in remembered if not has_key]:
        severe = 2 * len(refusing) >= len(state.opening.expected)  # a minority may report falsely
        yield _problem("older message key", record.id, {"devices": _named(refusing)}, is_severe=severe)
    ahead = {
        device: (epoch, trained)
        for device, (epoch, trained, _) in remembered
        if device not in refusing
        and (epoch > service.epoch or (trained > state.round and state.phase is not Phase.FINISHED))
    }
    if not ahead:
        return
    epoch, trained = max(ahead.values())
    is_cut_off = epoch > service.epoch
    know = f"{_named(list(ahead))} know{'s' if len(ahead) == 1 else ''}"
    theirs, ours = {"epoch": epoch, "round": trained}, {"own_epoch": service.epoch, "own_round": state.round}
    kind = "devices refuse an earlier epoch" if is_cut_off else "devices are ahead"
    found = _problem(kind, record.id, {"know": know, **theirs, **ours})
    yield replace(found, kind="devices are ahead", is_severe=is_cut_off)


def _named(devices: list[str]) -> str:
    return f"{', '.join(devices[:5])}{' and more' if len(devices) > 5 else ''}"


def _of_reports(federation: str, state: RoundState, service: Service) -> Iterator[Problem]:
    """Problems of device clocks, and of updates for which the coordinator has no space."""
    for device, ahead_s in dict(service.conditions.clock_ahead_s).items():
        if abs(ahead_s) > CLOCK_S and device in state.online:
            where = "ahead of" if ahead_s > 0 else "behind"
            yield _problem("clock", device, {"minutes": abs(ahead_s) / 60, "where": where}, device=device)
    if waiting := dict(service.receiver.without_room):
        updates = f"{len(waiting)} update{'s' if len(waiting) > 1 else ''}"
        reason = next(iter(waiting.values()))
        fewer = {"max_clients": max(state.policy.quorum, len(state.participants) // 2)}
        about = {"updates": updates, "reason": reason}
        yield _problem("full partial store", federation, about, repairs=(Repair("set", federation, fewer),))
