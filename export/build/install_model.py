"""Installs a personal model as a version: exports and verifies it, writes a manifest, and puts it in use in one atomic step. Uses torch.

Gate for new versions: accuracy on the device's held-out images must not drop by more than a bound.
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

from export.build.to_onnx import export_personal, verify
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

ALLOWED = 0.01  # largest accuracy loss, as a share: about the sampling error of a few hundred images


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
        installed: the versions, one of them in service.
        files: held-out image files, or tensors, of this device.
        labels: index of the right class per file.
        allowed: largest accuracy loss of the new one, as a share.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Returns:
        The comparison; None if none is possible: no files, no usable model in service, or other classes or tensors.

    Raises:
        GateError: the new one loses more than allowed.
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
            f"the new model's accuracy on {len(files)} held-out images is {right[1]:.1%}; version {old.directory.name} in service has "
            f"{right[0]:.1%}. At most {allowed:.1%} less is allowed, so {old.directory.name} stays in service"
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
    variants: HeldOut | None = None,
    gate: float | None = None,
    key: Path | None = None,
    before: nn.Module | None = None,
) -> Path:
    """Export a personal model, verify it against torch, and put it in use as the newest version.

    Args:
        spec: the federation's spec.
        parts: weights of the parts that the method's model is made of; others are ignored.
        slots_root: root of this device's versions.
        round_number: the round the weights come from.
        test_files: held-out image files, or tensors; if empty, random inputs are compared.
        test_labels: index of the right class per file.
        metrics: figures to store in the manifest, by name.
        variants: inputs to evaluate float16 and int8; None for only the model as exported.
        gate: largest accuracy loss on the test files compared with the version in use, as a share; None for no comparison.
        key: file of the device's message key, to sign the manifest; None for an unsigned model.
        before: layer in front of the network, normalised images in and out; it becomes part of the model.

    Returns:
        Directory of the new version. Its manifest contains the comparison with the trained model.

    Raises:
        NetworkError: weights that do not fit the spec's networks.
        ExportError: the network cannot be written as ONNX, the ONNX model differs from the trained one, or its accuracy is below the
            gate. Nothing is installed and the version in use does not change.
    """
    installed, threads = ModelVersions(slots_root), torch.get_num_threads()

    def fill(directory: Path) -> None:
        model_path = directory / manifest.MODEL_NAME
        exported = export_personal(spec, parts, model_path, round_number=round_number, before=before)
        verification = verify(model_path, spec, parts, test_files, test_labels, before=before)
        content = exported.content
        described = manifest.Manifest(
            federation=spec.federation,
            round=round_number,
            spec=spec.digest,
            classes=spec.classes,
            input=spec.input,
            takes="pixels" if isinstance(spec.input, ImageForm) else "tensors",
            model=manifest.ModelFile(sha256=manifest.digest(content), size=len(content), opset=exported.opset),
            metrics=dict(metrics or {}),
            verification=verification,
            created=datetime.now(timezone.utc),
            versions={
                "fedcg-edge": version("fedcg-edge"),
                "torch": str(torch.__version__),
                "onnx": version("onnx"),
                "exporter": exported.exporter,
            },
        )
        manifest.write_manifest(directory, described)
        if variants is not None:
            add_variants(directory, variants, threads=threads)
            verify_variants(directory, test_files, test_labels, threads=threads)
        if gate is not None:
            passed = pass_gate(directory, installed, test_files, test_labels, gate, threads=threads)
            manifest.write_manifest(directory, manifest.read_manifest(directory).model_copy(update={"gate": passed}))
        if key is not None:
            manifest.sign_manifest(directory, key)

    return installed.install(fill)


_NEEDED = (Part.EXTRACTOR, Part.CLASSIFIER)


def read_spec(path: Path) -> FederationSpec:
    """A spec from its canonical JSON file.

    Raises:
        InputError: the file cannot be read, or is not a spec.
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
    """Reject weights that need an input layer with the device's key; the agent's snapshot names their data defence."""
    snapshot = path.with_name("snapshot.json")
    with contextlib.suppress(OSError, ValueError, AttributeError):  # weights from elsewhere
        label = json.loads(snapshot.read_bytes()).get("defence", "")
        name = label.partition("-")[0]
        if name in defence_names() and defence_of(name, {})[0].input_layer is not None:
            raise InputError(
                str(path),
                f"trained on images encrypted by the data defence {name}; without the device's key the model can't classify real "
                "images. Use a version that the agent exported, under models/ in its store",
            )


def read_weights(path: Path, slot: str | None = None) -> Mapping[Part, Weights]:
    """Extractor and classifier from a safetensors file.

    Args:
        path: tensors named `part/name`, or `slot/part/name` as in an agent's private store.
        slot: which slot, if the file has slots.

    Raises:
        InputError: the file cannot be read, has no extractor and classifier under that slot, or needs an input layer that only the
            agent has.
    """
    if not path.exists():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    _check_defence(path)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(str(path), f"not a readable safetensors file: {error}") from error
    prefix = f"{slot}/" if slot else ""
    parts: dict[Part, Weights] = {
        part: {name[len(start) :]: tensor for name, tensor in tensors.items() if name.startswith(start)}
        for part in _NEEDED
        for start in (f"{prefix}{part.value}/",)
    }
    missing = [part.value for part, weights in parts.items() if not weights]
    if missing:
        slots = sorted({name.split("/")[0] for name in tensors if name.count("/") >= 2})
        hint = f"; choose a slot with --slot: {', '.join(slots)}" if slots else ""
        raise InputError(str(path), f"contains no tensor {prefix}{missing[0]}/…{hint}")
    return parts
