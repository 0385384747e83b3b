"""Reads the device's own data: its images, split as the agent split them, and its private weights. Nothing of it is sent."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from audit.errors import DecodeError, TruthError
from audit.evidence.case import Truth, View
from audit.recording.leakage import PrivateTensor, state_files
from fedcg.imaging import decode_image, read_file
from fedcg.learning.client import Client
from fedcg.learning.data.image_folder import LocalImages, from_arrays, read_images, split_source
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.assembly import layout_of
from fedcg.learning.networks.own_backbone import device_spec
from fedcg.learning.program import Program
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import extract_features
from fedcg.values import Value
from fedcg.wire.parts import Part

PrivateParts = Mapping[Part, Weights]
SECRET_FILE = Path("secrets", "cohort.key")
"""The cohort's secret of a device, below the agent's store."""


def read_truth(view: View, data: Path, private: Path | None = None, held_out: Path | None = None) -> Truth:
    """Read the device's images and, if given, its private weights, checked against the update.

    Args:
        view: the update.
        data: the images as the agent has them, or FOLDER/program:MODULE:FUNCTION; images outside the training set are
            held out.
        private: the agent's store, or a file of a simulation with `before/` and `after/`.
        held_out: more images of the same kind that were not trained on.

    Raises:
        DataError: images can't be read.
        TruthError: the images do not belong to the update, or the weights not to the round.
    """
    spec = view.spec
    found = _read(view, data)
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
    if private.is_dir():
        _check_snapshot(view, private, data, {one.sha256 for one in found.entries if where[one.path] == "train"})
    return Truth(train, unseen, *read_private(view, private))


def _read(view: View, data: Path) -> LocalImages:
    client = _client_of(view, data)
    if client is None:
        return read_images(data, view.spec.classes, view.spec.input)
    return from_arrays(client.arrays(view.client), data, view.spec.classes, view.spec.input, None)


def _client_of(view: View, data: Path) -> Client | None:
    """Load the device's own program, with the public start; None if it has none."""
    if (program := Program.of_source(data)) is None:
        return None
    if not view.spec.classes:
        raise TruthError("an audit attacks classification only, not the program of a fedcg.Trainer")
    spec = view.spec
    return program.client(view.client, Streams(spec_root(spec.seed)).at(spec.federation, "initial").seed("program"))


def joined(some: ImageSet, more: ImageSet) -> ImageSet:
    """Join two image sets."""
    return ImageSet(torch.cat([some.images, more.images]), torch.cat([some.labels, more.labels]), some.classes)


def _check_counts(view: View, train: ImageSet, data: Path) -> None:
    """Check whether the update can come from these images, as far as its report shows."""
    examples, counts = view.report.examples, view.report.label_counts
    if examples is not None and examples != len(train):
        raise TruthError(
            f"{data} holds {len(train)} training images, and the update of {view.client} was trained on {examples}: "
            "these are not the images that the model saw, or they have changed since"
        )
    if counts is not None and counts != train.label_counts():
        raise TruthError(
            f"{data}: images per class are {train.label_counts()}, the update of {view.client} reports {counts}"
        )


def _check_snapshot(view: View, store: Path, data: Path, given: set[str]) -> None:
    """Check whether the round trained on these images, by the snapshot that the store keeps of each of its two newest rounds."""
    kept = _generations(store).get(view.round)
    if kept is not None and (file := kept.tensors.with_name("snapshot.json")).exists():
        used = {entry["sha256"] for entry in json.loads(file.read_text()) if entry["split"] == "train"}
        if other := len(given - used):
            raise TruthError(
                f"{data}: {other} of its {len(given)} training images are not those of round {view.round}, which "
                f"{file} lists: give the images as the device has them"
            )


def read_private(view: View, place: Path) -> tuple[PrivateParts | None, PrivateParts | None, Mapping[str, Weights]]:
    """Read a device's private parts before and after the round, and its method's extras after it.

    Args:
        view: of the round's update.
        place: the agent's store (the folder that holds `generations/`), which keeps the two newest rounds, or a
            safetensors file with keys `before/PART/NAME`, `after/PART/NAME` and `extras/GROUP/NAME`.

    Raises:
        DecodeError: it can't be read.
        TruthError: the round is missing, or the tensors do not match the spec.
    """
    wanted = view.hidden
    if place.is_dir():
        states = _generations(place)
        if view.round not in states:
            raise TruthError(
                f"{place} holds the private weights of rounds {sorted(states) or 'none'}, not of round {view.round}: an agent keeps the last two"
            )
        if view.artifact and states[view.round].update not in ("", view.artifact):
            raise TruthError(
                f"{place} is the store of another device: the update of round {view.round} in it is not {view.artifact[:12]}"
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


def own_view(view: View, place: Path | None, data: Path) -> View:
    """Return the view with the device's own networks, if devices have their own programs or backbones.

    Args:
        view: of the device's update.
        place: the agent's store, or a simulation's file.
        data: as for `read_truth`.

    Raises:
        DecodeError: the store can't be read.
        LearningError: the store names a backbone that the spec does not list, or the program can't be used.
        TruthError: the program is a trainer.
    """
    if (client := _client_of(view, data)) is not None:
        network = client.bound(view.spec.network, view.spec.input, view.client)
        return replace(view, spec=view.spec.model_copy(update={"network": network}))
    if not view.spec.network.backbones or place is None or not place.is_dir():
        return view
    kept = _generations(place).get(view.round)
    return replace(view, spec=device_spec(view.spec, kept.backbone)) if kept and kept.backbone else view


def inputs_and_features(spec: FederationSpec, data: Path, private: Sequence[Path]) -> list[PrivateTensor]:
    """Return the device's images, as files and as the network's input, by rows and by columns, and their features behind each extractor in its files, as numbers that must not be sent.

    Raises:
        DataError: images can't be read.
    """
    found = read_images(data, spec.classes, spec.input)
    images = found.images.images
    kinds: list[tuple[str, Iterable[torch.Tensor]]] = [("input", images)]
    if data.is_dir() and images.ndim == 4:  # files are often smaller than the network's input
        contents = (read_file(data / one.path) for one in found.entries)
        files = [torch.from_numpy(decode_image(some, spec.image, resize=False)).movedim(-1, 0) for some in contents]
        kinds.append(("file", [one for one in files if one.numel() < images[0].numel()]))
    kinds += [(f"{kind} by columns", [one.mT for one in some]) for kind, some in kinds if images.ndim == 4]
    states = state_files(private)
    extractors = [_tensors(file, slot).get(Part.EXTRACTOR.value) for file in states for slot in ("personal", "after")]
    kinds += [
        ("features of input", extract_features(load_part(spec, Part.EXTRACTOR, weights), images, spec))
        for weights in extractors
        if weights and layout_of(weights) == tuple(spec.layouts[Part.EXTRACTOR])
    ]
    named = [(f"{kind} {number}", one) for kind, some in kinds for number, one in enumerate(some)]
    return [PrivateTensor(str(data), name, one.numpy().ravel()) for name, one in named]


class _Generation(Value):
    """A round in an agent's store: its tensors file, the sha256 of its update if it has one, and the device's own backbone."""

    tensors: Path
    update: str
    backbone: str


def _generations(store: Path) -> dict[int, _Generation]:
    """Return the newest generation of each round that an agent's store keeps."""
    found = {}
    for folder in sorted((store / "generations").glob("*")):
        try:
            described = json.loads((folder / "state.json").read_text().partition("\n")[0])  # followed by its checksum
            update = str((described.get("outbox") or {}).get("artifact", ""))
            kept = _Generation(folder / "state.safetensors", update, str(described.get("backbone", "")))
            found[int(described["cursor"]["round"])] = kept
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # noqa: PERF203 - two folders
            raise DecodeError(f"{folder} is not a generation of an agent's store: {error}") from error
    return found


def _parts(file: Path, slot: str, wanted: frozenset[Part]) -> PrivateParts:
    names = {one.value for one in wanted}
    return {Part(part): weights for part, weights in _tensors(file, slot).items() if part in names}


def _tensors(file: Path, slot: str) -> dict[str, dict[str, torch.Tensor]]:
    """Return the tensors with keys `SLOT/GROUP/NAME`, by group and name."""
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
                f"{place}: its {part.value} has other tensors than the federation's: check that network and device match"
            )
    missing = sorted(part.value for part in view.hidden - (parts or {}).keys())
    if parts is not None and missing:
        raise TruthError(f"{place} holds no {', '.join(missing)}")
