"""Personal model to an installed version: exported, verified, described by a manifest, put in use in one atomic step. Uses torch.

The gate before a new version: on the box's own held-out images it must be as good as the one in service, or nearly.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from export.build.to_onnx import Exported, export_personal, verify
from export.build.variants import HeldOut, add_variants, verify_variants
from export.errors import GateError, InputError, ModelError, SlotError
from export.model import manifest
from export.model.runtime import Model, Sample, load_all
from export.model.versions import ModelVersions
from fedcg.errors import NOT_FOUND
from fedcg.input_form import ImageForm, can_take
from fedcg.learning.defences.defence import defence_names, defence_of
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

ALLOWED = 0.01  # accuracy that a new version may lose, as a share: chance moves a few hundred images by as much


def pass_gate(
    candidate: Path,
    installed: ModelVersions,
    files: Sequence[Path | Sample],
    labels: Sequence[int],
    allowed: float = ALLOWED,
    *,
    threads: int = 0,
) -> manifest.Gate | None:
    """Compare a model with the one in service on the same image files or tensors.

    Args:
        candidate: directory of the new model, not installed yet.
        installed: where the one in service is.
        files: held-out image files, or tensors, of this box.
        labels: index of the right class per file.
        allowed: accuracy that the new one may lose, as a share.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Returns:
        What was compared; None where nothing can be: no files, no usable model in service, or one of other classes or tensors.

    Raises:
        GateError: the new one is worse by more than is allowed.
        ModelError: the new one does not run.
        InputError: a file that cannot be read as an image.
    """
    if not files:
        return None
    new = Model.load(candidate, threads=threads)
    try:
        old = Model.load(installed.current(), threads=threads)
    except (ModelError, SlotError):
        return None
    if set(old.manifest.classes) != set(new.manifest.classes) or not can_take(old.manifest.input, new.manifest.input):
        return None
    names = [new.manifest.classes[label] for label in labels]
    right = [_right(model, files, names) for model in (old, new)]
    if right[1] < right[0] - allowed:
        raise GateError(
            f"the new model gets {right[1]:.1%} of {len(files)} held-out images right, version {old.directory.name} in service "
            f"{right[0]:.1%}; at most {allowed:.1%} less is allowed, so {old.directory.name} stays"
        )
    return manifest.Gate(
        against=old.directory.name, images=len(files), before=right[0], accuracy=right[1], allowed=allowed
    )


def _right(model: Model, files: Sequence[Path | Sample], names: Sequence[str]) -> float:
    inputs = load_all(files, model.manifest.input)
    guessed = [model.manifest.classes[index] for index in model.predict(inputs).argmax(axis=1)]
    return float(np.mean([guess == name for guess, name in zip(guessed, names, strict=True)]))


def package_personal(
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    slots_root: Path,
    *,
    round_number: int,
    test_files: Sequence[Path | Sample] = (),
    test_labels: Sequence[int] = (),
    metrics: Mapping[str, float] | None = None,
    takes: manifest.Takes = "pixels",
    variants: HeldOut | None = None,
    gate: float | None = None,
    key: Path | None = None,
    before: nn.Module | None = None,
) -> Path:
    """Export a personal model, verify it against torch, and put it in use as the newest version.

    Args:
        spec: the federation's spec.
        parts: weights of the parts that the method's model is made of; others are ignored.
        slots_root: root of this box's versions.
        round_number: the round the weights come from.
        test_files: held-out image files, or tensors; without any, random ones are compared.
        test_labels: index of the right class per file.
        metrics: figures to keep beside the model, by name.
        takes: of images: pixels of any size, or normalised ones at the network's size: then there is no preprocessing in the file.
        variants: inputs to try float16 and int8 by; None for the model as exported alone.
        gate: accuracy that it may lose on the test files against the version in use, as a share; None for no comparison.
        key: file of the device's message key, which signs the manifest; None for an unsigned model.
        before: what images go through before the network, normalised ones in and out; it becomes part of the model.

    Returns:
        Directory of the new version; its manifest holds the comparison with the trained model.

    Raises:
        NetworkError: weights that do not fit the spec's networks.
        ExportError: the network cannot be written as ONNX, or the ONNX model is not the trained one, or it is worse than the gate
            allows. Nothing was installed then and the version in use stays.
    """
    installed, threads = ModelVersions(slots_root), torch.get_num_threads()
    takes = takes if isinstance(spec.input, ImageForm) else "tensors"

    def fill(directory: Path) -> None:
        model_path = directory / manifest.MODEL_NAME
        exported = export_personal(spec, parts, model_path, round_number=round_number, takes=takes, before=before)
        verification = verify(model_path, spec, parts, test_files, test_labels, takes=takes, before=before)
        manifest.write_manifest(directory, _manifest(spec, exported, verification, metrics or {}, round_number, takes))
        if variants is not None:
            add_variants(directory, variants, threads=threads)
            verify_variants(directory, test_files, test_labels, threads=threads)
        if gate is not None:
            passed = pass_gate(directory, installed, test_files, test_labels, gate, threads=threads)
            manifest.write_manifest(directory, manifest.read_manifest(directory).model_copy(update={"gate": passed}))
        if key is not None:
            manifest.sign_manifest(directory, key)

    return installed.install(fill)


def _manifest(
    spec: FederationSpec,
    exported: Exported,
    verification: manifest.Verification,
    metrics: Mapping[str, float],
    round_number: int,
    takes: manifest.Takes,
) -> manifest.Manifest:
    content = exported.content
    return manifest.Manifest(
        federation=spec.federation,
        round=round_number,
        spec=spec.digest,
        classes=spec.classes,
        input=spec.input,
        takes=takes,
        model=manifest.ModelFile(sha256=manifest.digest(content), size=len(content), opset=exported.opset),
        metrics=dict(metrics),
        verification=verification,
        created=datetime.now(timezone.utc),
        versions={
            "fedcg-edge": version("fedcg-edge"),
            "torch": str(torch.__version__),
            "onnx": version("onnx"),
            "exporter": exported.exporter,
        },
    )


_NEEDED = (Part.EXTRACTOR, Part.CLASSIFIER)


def read_spec(path: Path) -> FederationSpec:
    """A spec from its canonical JSON file.

    Raises:
        InputError: cannot be read, or is not a spec.
    """
    if not path.exists():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    try:
        return FederationSpec.parse(path.read_bytes())
    except OSError as error:
        raise InputError(str(path), error.strerror or str(error)) from error
    except ValueError as error:
        raise InputError(str(path), f"not a federation's spec: {error}") from error


def _check_defence(path: Path) -> None:
    """An agent's state names the data defence of its images in the snapshot beside it."""
    snapshot = path.with_name("snapshot.json")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # weights from elsewhere
        label = json.loads(snapshot.read_bytes()).get("defence", "")
        name = label.partition("-")[0]
        if name in defence_names() and defence_of(name, {})[0].input_layer is not None:
            raise InputError(
                str(path),
                f"trained on images that the data defence {name} encrypted; a model without the device's key classifies no real "
                "image: use a version that the agent exported, under models/ of its store",
            )


def read_weights(path: Path, slot: str | None = None) -> Mapping[Part, Weights]:
    """Extractor and classifier from a safetensors file.

    Args:
        path: tensors named `part/name`, or `slot/part/name` as in an agent's private store.
        slot: which slot, where the file has slots.

    Raises:
        InputError: cannot be read, has no extractor and classifier under that slot, or a model of it needs an input layer
            that only the agent has.
    """
    if not path.exists():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    _check_defence(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(str(path), f"not a safetensors file that can be read: {error}") from error
    prefix = f"{slot}/" if slot else ""
    parts: dict[Part, Weights] = {
        part: {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
        for part in _NEEDED
        for start in (f"{prefix}{part.value}/",)
    }
    missing = [part.value for part, weights in parts.items() if not weights]
    if missing:
        slots = sorted({name.split("/")[0] for name in tensors if name.count("/") >= 2})
        hint = f"; choose one of its slots with --slot: {', '.join(slots)}" if slots else ""
        raise InputError(str(path), f"holds no tensor {prefix}{missing[0]}/…{hint}")
    return parts
