"""What left each device: parts, fields, codecs and sizes of its updates, everything else that it sends, and its own record of it.

Field names come from the schemas of all messages of devices, so the lists are complete. Tensors of parts are listed separately.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field

from coordinator.errors import NotFoundError
from coordinator.facts.known import Known
from coordinator.facts.models import served_models
from coordinator.rounds.records import UpdateRecord
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import ArtifactHeader
from fedcg.wire.messages.enrolment_messages import EnrolRequest, RenewRequest
from fedcg.wire.messages.schemas import DeviceMessage, Leave, Outcome
from fedcg.wire.parts import ReportField

SENT: tuple[type[BaseModel], ...] = (ArtifactHeader, *get_args(DeviceMessage), EnrolRequest, RenewRequest)
"""Everything that a device sends besides tensors. The page shows the first line of each docstring."""


def field_names(model: type[BaseModel]) -> Iterator[str]:
    """The names of all fields of a schema, including nested ones such as `condition.model.accuracy`."""
    for name, field in model.model_fields.items():
        inner = [f"{name}.{one}" for part in _schemas(field.annotation) for one in field_names(part)]
        yield from dict.fromkeys(inner or [name])


def _schemas(annotation: object) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas(inner)


COMMON = tuple(Leave.model_fields)
"""Fields of every MQTT message."""


def own_fields(model: type[BaseModel]) -> list[str]:
    """The field names of a schema in `SENT`, without those that every message has."""
    common = COMMON if model.model_fields.keys() >= set(COMMON) else ()
    return [name for name in field_names(model) if name not in common]


class PartSent(Value):
    """A part in updates: meaning in plain words, number of tensors, number of values, and their codec."""

    part: str
    meaning: str
    tensors: int
    numbers: int
    codec: str


class DeviceSent(Value):
    """The data that one device sent.

    Attributes:
        updates: number of completely received updates with any outcome; `size` is their total in bytes.
        last: the last update.
        fields: report fields in any update of `rounds` (if `rounds` is empty: in the last update), and `model` and `telemetry`
            if the device reports them outside of updates.
        facts: further values in the headers of these updates, by name.
        rounds: all updates, oldest first; empty unless in full.
        periods: by report field, the first and the last of these rounds that contained it: what the owner allowed, as seen here.
    """

    client: str
    updates: int
    size: int
    last: UpdateRecord
    fields: list[str]
    facts: dict[str, list[str]]
    rounds: list[UpdateRecord]
    periods: dict[str, tuple[int, int]]


class Sent(Value):
    """What left the devices of a federation.

    Attributes:
        parts: the parts in every update; the coordinator rejects an update with anything else.
        kept: parts of the networks that are in no update.
        fields: every report field: its meaning, and when it is sent.
        messages: by name of message or header: when it is sent, and its fields.
        common: the fields of every message.
        start: the source of private networks' initial weights; `open_start` lists the devices that use the public seed.
    """

    federation: str
    method: str
    parts: list[PartSent]
    kept: list[str]
    fields: dict[str, tuple[str, str]]
    messages: dict[str, tuple[str, list[str]]]
    common: tuple[str, ...]
    start: str
    open_start: list[str]
    devices: list[DeviceSent]
    size: int


def sent(known: Known, federation: str, in_full: bool = False, device: str | None = None) -> Sent:
    """What left the devices of a federation, or one of them; `in_full` lists every update.

    Raises:
        NotFoundError: there is no such federation, or no complete update of this device.
    """
    record, overview = known.federation(federation), known.store.overview
    spec = known.spec(record)
    every: dict[str, list[UpdateRecord]] = defaultdict(list)
    for each in overview.deliveries(record.id, device) if in_full else ():
        every[each.client].append(each)
    if device is not None and not every:
        raise NotFoundError(f"no complete update of {device!r} to {record.id} has arrived")
    volumes, reporting = overview.volumes(record.id), {each.device for each in served_models(known, federation)}
    devices, service = [], known.services.get(federation)
    readings = {} if service is None else service.conditions.readings
    for client, last in sorted(overview.last_deliveries(record.id, device).items()):
        updates, size = volumes.get(client, (1, last.size))
        of_itself = {"model": client in reporting, "telemetry": client in readings}
        listed = every[client] or [last]
        told = {name for each in listed for name in each.reported}
        fields = sorted(told | {name for name, is_told in of_itself.items() if is_told})
        pairs = sorted({pair for each in listed for pair in each.described.items()})
        facts = {name: [value for key, value in pairs if key == name] for name, _ in pairs}
        periods: dict[str, tuple[int, int]] = {}
        for each in every[client]:
            for name in each.reported:
                periods[name] = periods.get(name, (each.round, 0))[0], each.round
        devices.append(DeviceSent(client, updates, size, last, fields, facts, every[client], periods))
    return Sent(
        record.id,
        record.method,
        _parts(spec),
        sorted(part.value for part in spec.layouts if part not in (*spec.upload, *spec.sealed)),
        {field.value: (field.meaning, _when(field, spec)) for field in ReportField},
        {_words(model.__name__): ((model.__doc__ or "").partition("\n")[0], own_fields(model)) for model in SENT},
        COMMON,
        spec.network.private_start(None),
        [] if service is None else service.cohorts.without(),
        devices,
        sum(each.size for each in devices),
    )


class OwnUpdate(BaseModel, frozen=True):
    """An update in a device's own record. `receipt` is the coordinator's answer, None without one."""

    t: float
    federation: str
    round: int
    attempt: int
    artifact: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    bytes: int
    receipt: str | None


class OwnRecord(BaseModel, frozen=True):
    """The output of `fedcg agent sent --json`."""

    device: str
    items: list[dict[str, Any]]

    @staticmethod
    def read(text: str | bytes) -> OwnRecord:
        """Read the output of the command.

        Raises:
            ValidationError: it is something else.
        """
        return _Output.model_validate_json(text).data

    def updates(self, federation: str) -> list[OwnUpdate]:
        """Its updates to a federation.

        Raises:
            ValidationError: an update lacks a field.
        """
        updates = [OwnUpdate.model_validate(each) for each in self.items if each.get("kind") == "update"]
        return [each for each in updates if each.federation == federation]


class _Output(BaseModel, frozen=True):
    data: OwnRecord


class Difference(Value):
    """A difference between a device's own record and the coordinator's."""

    round: int
    attempt: int
    artifact: str
    what: str


class Comparison(Value):
    """A device's own record against the coordinator's.

    Attributes:
        same: number of updates that both list with the same SHA-256, size and outcome.
        outside: number of the coordinator's updates from before the record's first item or after its last, which were not compared.
    """

    device: str
    same: int
    outside: int
    differences: list[Difference]


def compare_records(record: OwnRecord, federation: str, stored: Sequence[Mapping[str, Any]]) -> Comparison:
    """Compare a device's own record with its updates at the coordinator (fields of `UpdateRecord`).

    Raises:
        ValidationError: not the output of `fedcg agent sent --json`.
    """
    own = {each.artifact: each for each in record.updates(federation)}
    here = {each["artifact"]: each for each in stored}
    times = [each["t"] for each in record.items if isinstance(each.get("t"), float)] or [math.inf]
    same, outside, found = 0, 0, []
    for artifact in {**here, **own}:
        mine, other = here.get(artifact), own.get(artifact)
        if other is None:
            assert mine is not None
            outside += (is_outside := not min(times) <= mine["stored_at"] <= max(times))
            what = "" if is_outside else "it arrived here, but the device's record lacks it"
        elif mine is None:
            lost = "the device sent it, but it never arrived completely"
            what = lost if other.receipt is None else f"{other.receipt} on the device, but not listed here"
        elif mine["size"] != other.bytes:
            what = f"{other.bytes} bytes on the device, {mine['size']} here"
        elif other.receipt not in (None, mine["outcome"]):
            what = f"{other.receipt} on the device, {Outcome(mine['outcome']).value} here"
        else:
            what, same = "", same + 1
        if what:
            at = own[artifact].model_dump() if mine is None else mine
            found.append(Difference(at["round"], at["attempt"], artifact, what))
    return Comparison(record.device, same, outside, sorted(found, key=lambda each: (each.round, each.attempt)))


def _when(field: ReportField, spec: FederationSpec) -> str:
    """When a field is sent. The device's policy decides; methods only request fields, and few request label counts."""
    if field is ReportField.LABEL_COUNTS and field not in spec.report:
        return "never: the method does not use it"
    if field in spec.required_report:
        return "always: the method needs it. A device declines rounds if its owner does not allow it"
    return "if the owner allows it" + ("; the method then uses it" if field in spec.optional_report else "")


def _words(name: str) -> str:
    return re.sub(r"\B([A-Z])", r" \1", name).lower()


def _parts(spec: FederationSpec) -> list[PartSent]:
    delta = spec.codec.endswith("-delta")
    found = []
    for part in spec.upload:
        tensors = spec.layouts[part]
        codec = spec.codec.removesuffix("-delta") if delta and part not in spec.with_base else spec.codec
        if all(each.dtype != "float32" for each in tensors):
            codec = "whole numbers"
        numbers = sum(math.prod(each.shape) for each in tensors)
        found.append(PartSent(part.value, spec.meaning_of(part), len(tensors), numbers, codec))
    return found
