"""What left each device: parts, fields, codecs and sizes of its updates, and everything else that it sends.

Field names come from the schemas of all messages of devices, so the lists are complete. Tensors of parts are listed separately.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel

from coordinator.facts.known import Known
from coordinator.facts.models import served_models
from coordinator.rounds.records import UpdateRecord
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import ArtifactHeader
from fedcg.wire.messages.enrolment_messages import EnrolRequest, RenewRequest
from fedcg.wire.messages.schemas import DeviceMessage, Leave
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
    """

    client: str
    updates: int
    size: int
    last: UpdateRecord
    fields: list[str]
    facts: dict[str, list[str]]
    rounds: list[UpdateRecord]


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


def sent(known: Known, federation: str, in_full: bool = False) -> Sent:
    """What left the devices of a federation; `in_full` lists every update.

    Raises:
        NotFoundError: there is no such federation.
    """
    record, overview = known.federation(federation), known.store.overview
    spec = known.spec(record)
    every: dict[str, list[UpdateRecord]] = defaultdict(list)
    for each in overview.deliveries(record.id) if in_full else ():
        every[each.client].append(each)
    volumes, reporting = overview.volumes(record.id), {each.device for each in served_models(known, federation)}
    devices, service = [], known.services.get(federation)
    for client, last in sorted(overview.last_deliveries(record.id).items()):
        updates, size = volumes.get(client, (1, last.size))
        of_itself = {
            "model": client in reporting,
            "telemetry": service is not None and client in service.conditions.readings,
        }
        listed = every[client] or [last]
        fields = sorted(_fields(listed) | {name for name, is_told in of_itself.items() if is_told})
        pairs = sorted({pair for each in listed for pair in each.described.items()})
        facts = {name: [value for key, value in pairs if key == name] for name, _ in pairs}
        devices.append(DeviceSent(client, updates, size, last, fields, facts, every[client]))
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
        sum(size for _, size in volumes.values()),
    )


def _when(field: ReportField, spec: FederationSpec) -> str:
    """When a field is sent. The device's policy decides; methods only request fields, and few request label counts."""
    if field is ReportField.LABEL_COUNTS and field not in spec.report:
        return "never: the method does not use it"
    if field in spec.required_report:
        return "always: the method needs it. A device declines rounds if its owner does not allow it"
    return "if the owner allows it" + ("; the method then uses it" if field in spec.optional_report else "")


def _words(name: str) -> str:
    return re.sub(r"\B([A-Z])", r" \1", name).lower()


def _fields(deliveries: list[UpdateRecord]) -> set[str]:
    return {name for each in deliveries for name in each.reported}


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
