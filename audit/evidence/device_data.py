"""Reads what only the device knows: its images, divided as the agent divided them, and its private weights. Nothing of it is sent."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from audit.errors import DecodeError, TruthError
from audit.evidence.case import Truth, View
from fedcg.learning.data.image_folder import read_images, split_source
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks.assembly import layout_of
from fedcg.learning.networks.own_backbone import device_spec
from fedcg.wire.parts import Part

PrivateParts = Mapping[Part, Weights]
SECRET_FILE = Path("secrets", "cohort.key")
"""Of a device with its cohort's secret, below the agent's store."""


def read_truth(view: View, data: Path, private: Path | None = None, held_out: Path | None = None) -> Truth:
    """The device's images and, where given, its private weights, checked against the update.

    Args:
        view: the update.
        data: the images as the agent has them; what it does not train on is held out.
        private: the agent's store, or a file of a simulation with `before/` and `after/`.
        held_out: more images of the same kind that were not trained on.

    Raises:
        DataError: images can't be read.
        TruthError: they are not those of the update, or the weights are not those of the round.
    """
    spec = view.spec
    found = read_images(data, spec.classes, spec.input)
    where = split_source(data, found.entries, spec.classes)
    seen, unseen_rows = (
        [row for row, one in enumerate(found.entries) if (where[one.path] == "train") is is_train]
        for is_train in (True, False)
    )
    train, unseen = found.images.rows(seen), found.images.rows(unseen_rows)
    if held_out is not None:
        unseen = joined(unseen, read_images(held_out, spec.classes, spec.input).images)
    _check_counts(view, train, data)
    if private is None:
        return Truth(train, unseen)
    return Truth(train, unseen, *read_private(view, private))


def joined(some: ImageSet, more: ImageSet) -> ImageSet:
    """Both, one after the other."""
    return ImageSet(torch.cat([some.images, more.images]), torch.cat([some.labels, more.labels]), some.classes)


def _check_counts(view: View, train: ImageSet, data: Path) -> None:
    """Whether the update can come from these images, as far as its report shows."""
    examples, counts = view.report.examples, view.report.label_counts
    if examples is not None and examples != len(train):
        raise TruthError(
            f"{data} holds {len(train)} training images, and the update of {view.client} was trained on {examples}: "
            "these are not the images that the model saw (or they changed since then)"
        )
    if counts is not None and counts != train.label_counts():
        raise TruthError(
            f"{data}: images per class are {train.label_counts()}, the update of {view.client} reports {counts}"
        )


def read_private(view: View, place: Path) -> tuple[PrivateParts | None, PrivateParts | None, Mapping[str, Weights]]:
    """A device's private parts before and after the round, and its method's extras after it.

    Args:
        view: of the round.
        place: the agent's store (the folder that holds `generations/`), of which the two newest rounds are there, or a safetensors
            file with keys `before/PART/NAME`, `after/PART/NAME` and `extras/GROUP/NAME`.

    Raises:
        DecodeError: it can't be read.
        TruthError: the round is not there, or the tensors are not those of the spec.
    """
    wanted = view.hidden
    if place.is_dir():
        states = {one.round: one for one in map(_generation, sorted((place / "generations").glob("*")))}
        if view.round not in states:
            raise TruthError(
                f"{place} holds the private weights of rounds {sorted(states) or 'none'}, not of round {view.round}: an agent keeps the last two"
            )
        if view.artifact and states[view.round].update not in ("", view.artifact):
            raise TruthError(
                f"{place} is the store of another device: its update of round {view.round} is not {view.artifact[:12]}"
            )
        file = states[view.round].tensors
        after = _parts(file, "personal", wanted)
        earlier = states.get(view.round - 1)
        before = None if earlier is None else _parts(earlier.tensors, "personal", wanted)
    else:
        file = place
        before, after = (_parts(file, when, wanted) for when in ("before", "after"))
    for parts in (before, after):
        _check_layout(view, parts, place)
    return before, after, _tensors(file, "extras")


def own_view(view: View, place: Path | None) -> View:
    """The view with the networks of the device that an agent's store belongs to, where each device has a backbone of its own.

    Raises:
        DecodeError: the store can't be read.
        NetworkError: it names a backbone that the spec does not list.
    """
    if not view.spec.network.backbones or place is None or not place.is_dir():
        return view
    found = {one.round: one.backbone for one in map(_generation, sorted((place / "generations").glob("*")))}
    name = found.get(view.round, "")
    return replace(view, spec=device_spec(view.spec, name)) if name else view


@dataclass(frozen=True)
class _Generation:
    """A round in an agent's store: its file of tensors, the sha256 of its update where there is one, the device's own backbone."""

    round: int
    tensors: Path
    update: str
    backbone: str


def _generation(folder: Path) -> _Generation:
    try:
        described = json.loads((folder / "state.json").read_text().partition("\n")[0])  # its checksum follows
        update = (described.get("outbox") or {}).get("artifact", "")
        number, backbone = int(described["cursor"]["round"]), str(described.get("backbone", ""))
        return _Generation(number, folder / "state.safetensors", str(update), backbone)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DecodeError(f"{folder} is no generation of an agent's store: {error}") from error


def _parts(file: Path, slot: str, wanted: frozenset[Part]) -> PrivateParts:
    names = {one.value for one in wanted}
    return {Part(part): weights for part, weights in _tensors(file, slot).items() if part in names}


def _tensors(file: Path, slot: str) -> dict[str, dict[str, torch.Tensor]]:
    """Those whose keys are `SLOT/GROUP/NAME`, by group and name."""
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise DecodeError(f"{file} can't be read as safetensors: {error}") from error
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        first, _, rest = key.partition("/")
        group, _, name = rest.partition("/")
        if first == slot:
            found.setdefault(group, {})[name] = tensor
    return found


def _check_layout(view: View, parts: PrivateParts | None, place: Path) -> None:
    for part, weights in (parts or {}).items():
        if layout_of(weights) != tuple(view.spec.layouts[part]):
            raise TruthError(
                f"{place}: its {part.value} has other tensors than the federation's: another network or device?"
            )
    missing = sorted(part.value for part in view.hidden - (parts or {}).keys())
    if parts is not None and missing:
        raise TruthError(f"{place} holds no {', '.join(missing)}")
