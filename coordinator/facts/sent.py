"""What left each device: the parts and fields that its updates held, how they were coded, and their bytes."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.facts.known import Known
from fedcg.learning.spec import FederationSpec


@dataclass(frozen=True)
class PartSent:
    """A part of the networks that updates hold: its tensors, numbers, and how the numbers are coded."""

    part: str
    tensors: int
    numbers: int
    codec: str


@dataclass(frozen=True)
class DeviceSent:
    """What one device delivered.

    Attributes:
        rounds: (round, attempt, bytes, outcome) of every update that was received in whole.
        fields: the report fields that were in any of them.
        size: bytes in total.
    """

    client: str
    rounds: list[tuple[int, int, int, str]]
    fields: list[str]
    size: int


@dataclass(frozen=True)
class Sent:
    """What left the devices of a federation.

    Attributes:
        parts: what every update holds; the coordinator rejects an update that holds anything else.
        kept: parts of the networks that no update holds.
        fields: report fields that the spec allows.
    """

    federation: str
    method: str
    parts: list[PartSent]
    kept: list[str]
    fields: list[str]
    devices: list[DeviceSent]
    size: int


def sent(known: Known, federation: str) -> Sent:
    """What the updates of a federation held.

    Raises:
        NotFoundError: there is no such federation.
    """
    record = known.federation(federation)
    spec = known.spec(record)
    by_client: dict[str, DeviceSent] = {}
    for each in known.store.overview.deliveries(record.id):
        before = by_client.get(each.client, DeviceSent(each.client, [], [], 0))
        by_client[each.client] = DeviceSent(
            each.client,
            [*before.rounds, (each.round, each.attempt, each.size, each.outcome)],
            sorted({*before.fields, *(name for name, value in each.report.items() if value is not None)}),
            before.size + each.size,
        )
    return Sent(
        record.id,
        record.method,
        _parts(spec),
        sorted(part.value for part in spec.layouts if part not in spec.upload),
        sorted(field.value for field in spec.report),
        [by_client[client] for client in sorted(by_client)],
        sum(each.size for each in by_client.values()),
    )


def _parts(spec: FederationSpec) -> list[PartSent]:
    found = []
    for part in spec.upload:
        tensors = spec.layouts[part]
        numbers = 0
        for tensor in tensors:
            count = 1
            for side in tensor.shape:
                count *= side
            numbers += count
        delta = spec.codec.endswith("-delta")
        codec = spec.codec.removesuffix("-delta") if delta and part not in spec.with_base else spec.codec
        found.append(PartSent(part.value, len(tensors), numbers, codec))
    return found
