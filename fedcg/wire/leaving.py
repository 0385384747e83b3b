"""All that a device sends: its messages and the header of its updates, with the names of their fields.

The names come from the schemas, so lists made of this hold every field that a device can send; tensors of parts come beside them.
"""

from collections.abc import Iterator
from typing import get_args, get_origin

from pydantic import BaseModel

from fedcg.wire.artifacts.artifacts import ArtifactHeader
from fedcg.wire.messages.enrolment_messages import EnrolRequest, RenewRequest
from fedcg.wire.messages.schemas import DeviceMessage, Leave

SENT: tuple[type[BaseModel], ...] = (ArtifactHeader, *get_args(DeviceMessage), EnrolRequest, RenewRequest)
"""What a device sends beside tensors; the first line of each one's docstring is what a person reads of it."""


def field_names(model: type[BaseModel]) -> Iterator[str]:
    """The names of all fields of a schema, those inside of fields too, such as `condition.model.accuracy`."""
    for name, field in model.model_fields.items():
        inner = [f"{name}.{one}" for part in _schemas(field.annotation) for one in field_names(part)]
        yield from dict.fromkeys(inner or [name])


def _schemas(annotation: object) -> Iterator[type[BaseModel]]:
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _schemas(inner)


COMMON = tuple(Leave.model_fields)
"""Fields of every message over MQTT."""


def own_fields(model: type[BaseModel]) -> list[str]:
    """The names of the fields of something in `SENT`, without those that every message has."""
    common = COMMON if model.model_fields.keys() >= set(COMMON) else ()
    return [name for name in field_names(model) if name not in common]
