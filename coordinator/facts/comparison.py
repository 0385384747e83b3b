"""Facts side by side: two versions of a federation's shared model, or two of its devices."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeVar

from coordinator.errors import NotFoundError, SteeringError
from coordinator.facts.known import Known
from coordinator.facts.models import ModelVersion, by_class, model_versions, served_models, worth
from coordinator.rounds.records import UpdateRecord
from coordinator.updates.robustness import Yardstick
from coordinator.updates.validation import base_in
from fedcg.values import Value
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import Outcome, ServedModel

MAX_READ_BYTES = 64_000_000
"""Of a version whose weights are compared; decoded, both take several times this memory."""
ReadArtifact = Callable[[str], bytes]
Unit = Literal["share", "size", "ms", "number", "text"]
KeyT = TypeVar("KeyT")
FoundT = TypeVar("FoundT")


class ComparedFigure(Value):
    """A figure of two versions or devices; None if unknown. A share is in [0, 1], a size in bytes."""

    what: str
    first: int | float | str | None
    second: int | float | str | None
    unit: Unit


def compared(known: Known, federation: str, first: str, second: str, read: ReadArtifact) -> list[ComparedFigure]:
    """Compare two versions, named by their rounds, or two devices.

    Args:
        known: the sources.
        federation: its id.
        first: number of a round (0: the initial version), or a device.
        second: likewise.
        read: returns the bytes of an artifact.

    Raises:
        NotFoundError: there is no such federation, version, or device with an accepted update.
        SteeringError: a version and a device.
    """
    are_numbers = {each.isascii() and each.isdigit() for each in (first, second)}
    if len(are_numbers) > 1:
        raise SteeringError(f"compare two rounds or two devices; {first[:63]!r} and {second[:63]!r} are one of each")
    return list((_of_versions if are_numbers == {True} else _of_devices)(known, federation, first, second, read))


def _of_versions(
    known: Known, federation: str, first: str, second: str, read: ReadArtifact
) -> Iterator[ComparedFigure]:
    every = {each.round: each for each in model_versions(known, federation)}
    one, other = (_found(every, int(number), f"version of round {number}") for number in (first, second))
    yield ComparedFigure("mean accuracy after training from it", one.accuracy, other.accuracy, "share")
    yield ComparedFigure("merged updates", one.merged, other.merged, "number")
    yield ComparedFigure("size", one.size, other.size, "size")
    updates = known.store.overview.deliveries(federation)
    trained = [
        {each.client: each for each in updates if each.round == number + 1 and each.outcome is Outcome.ACCEPTED}
        for number in (one.round, other.round)
    ]
    yield from _by_class(known, federation, trained)
    yield from _drift(known, federation, one, other, read)


def _drift(
    known: Known, federation: str, one: ModelVersion, other: ModelVersion, read: ReadArtifact
) -> Iterator[ComparedFigure]:
    spec = known.spec(known.federation(federation))
    if max(one.size, other.size) > MAX_READ_BYTES:
        yield ComparedFigure("distance between them", None, "too large to compare here", "text")
        return
    try:
        base, moved = (base_in(read(each.artifact), spec, each.artifact) for each in (one, other))
    except (OSError, WireError):
        yield ComparedFigure("distance between them", None, "not kept any more", "text")
        return
    lengths = Yardstick(replace(base, parts={}), {}).distances(base.parts)
    for part, distance in Yardstick(base, {}).distances(moved.parts).items():
        relative = distance / lengths[part] if lengths.get(part) else None
        yield ComparedFigure(f"relative L2 distance of the {part.value}", 0.0, relative, "number")


def _of_devices(
    known: Known, federation: str, first: str, second: str, _read: ReadArtifact
) -> Iterator[ComparedFigure]:
    last = known.store.overview.last_deliveries(known.federation(federation).id, outcome=Outcome.ACCEPTED)
    gains = {each.client: each for each in worth(known, federation).clients}
    a, b = (_found(gains, device, f"accepted update of {device[:63]!r}") for device in (first, second))
    yield ComparedFigure("accuracy", a.accuracy, b.accuracy, "share")
    yield ComparedFigure("local-only accuracy", a.alone, b.alone, "share")
    yield ComparedFigure("mean gain of the last rounds", a.mean, b.mean, "share")
    yield ComparedFigure("training images", a.examples, b.examples, "number")
    yield ComparedFigure("round of the last update", a.round, b.round, "number")
    yield from _by_class(known, federation, [{each: last[each]} for each in (first, second)])
    distances = ({part.value: far for part, far in last[each].distance_of.items()} for each in (first, second))
    yield from _each("L2 distance of its {} from the round's base", "number", *distances)
    served = {each.device: each.model for each in served_models(known, federation)}
    figures = [_of_export(served[each]) if each in served else {} for each in (first, second)]
    for what, unit in {**figures[0], **figures[1]}:
        yield ComparedFigure(what, figures[0].get((what, unit)), figures[1].get((what, unit)), unit)


def _of_export(model: ServedModel) -> dict[tuple[str, Unit], int | float | str | None]:
    found: dict[tuple[str, Unit], int | float | str | None] = {}
    found["exported model", "text"] = f"round {model.round}, {model.serves}"
    for form in model.forms:
        found[f"size of {form.name}", "size"] = form.size
        found[f"latency of {form.name}", "ms"] = form.latency_ms
    return found


def _by_class(known: Known, federation: str, trained: Iterable[Mapping[str, UpdateRecord]]) -> Iterator[ComparedFigure]:
    classes = ({each.name: each.personal for each in by_class(known, federation, some)} for some in trained)
    yield from _each("accuracy of class {}", "share", *classes)


def _each(
    what: str, unit: Unit, one: Mapping[str, float | None], other: Mapping[str, float | None]
) -> Iterator[ComparedFigure]:
    """A figure for each name in one of two mappings."""
    for name in {**one, **other}:
        yield ComparedFigure(what.format(name), one.get(name), other.get(name), unit)


def _found(every: Mapping[KeyT, FoundT], key: KeyT, what: str) -> FoundT:
    if key not in every:
        raise NotFoundError(f"there is no {what}")
    return every[key]
