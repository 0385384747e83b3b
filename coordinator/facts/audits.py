"""Facts about audits on devices: what they reported, and the rounds that they withheld."""

from collections import defaultdict
from typing import Literal

from coordinator.facts.devices import ReportedPrivacy, reported_privacy
from coordinator.facts.known import Known
from coordinator.rounds.records import UpdateRecord
from fedcg.values import Value

SHOWN_ROUNDS = 100


class AuditedRound(Value):
    """A round that a device audited: `sent` with the figures that its owner reports, or `withheld` because its gate was not met."""

    round: int
    attempt: int
    outcome: Literal["sent", "withheld"]


class DeviceAudits(Value):
    """The audits of one device.

    Attributes:
        rounds: at most the last `SHOWN_ROUNDS` rounds of the federation, oldest first.
        last: the figures in its last audited update; None if it withheld all.
    """

    device: str
    rounds: list[AuditedRound]
    last: ReportedPrivacy | None


def device_audits(known: Known, federation: str) -> list[DeviceAudits]:
    """The audits of the devices that report figures or withheld an update, by name.

    A gate is a matter of the device: the coordinator knows neither its conditions nor the figures of a withheld update.

    Raises:
        NotFoundError: there is no such federation.
    """
    record, overview = known.federation(federation), known.store.overview
    since = known.state(record.id).round - SHOWN_ROUNDS
    found, last = defaultdict[str, list[AuditedRound]](list), dict[str, UpdateRecord]()
    for each in overview.audited(record.id, since):
        found[each.client].append(AuditedRound(each.round, each.attempt, "sent"))
        last[each.client] = each
    for client, number, attempt in overview.withheld(record.id, since):
        found[client].append(AuditedRound(number, attempt, "withheld"))
    return [
        DeviceAudits(
            name,
            sorted(rounds, key=lambda each: (each.round, each.attempt)),
            reported_privacy(last[name]) if name in last else None,
        )
        for name, rounds in sorted(found.items())
    ]
