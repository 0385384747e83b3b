"""Personal model to an installed version: exported, verified, described by a manifest, put in use in one atomic step. Uses torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from export.build.accuracy_gate import pass_gate
from export.build.to_onnx import Exported, export_personal
from export.build.variants import HeldOut, add_variants
from export.build.verify import verify
from export.build.verify_variants import verify_variants
from export.model.manifest import (
    MODEL_NAME,
    Manifest,
    ModelFile,
    Takes,
    VariantName,
    Verification,
    digest,
    read_manifest,
    write_manifest,
)
from export.model.signature import sign_manifest
from export.model.versions import Slots
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights


@dataclass(frozen=True)
class Installed:
    """A version that was put in use, and how it compared with the trained model."""

    model_dir: Path
    verification: Verification
    serves: VariantName


def package_personal(
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    slots_root: Path,
    *,
    test_files: Sequence[Path],
    test_labels: Sequence[int],
    metrics: Mapping[str, float],
    round_number: int,
    takes: Takes = "pixels",
    variants: HeldOut | None = None,
    gate: float | None = None,
    key: Path | None = None,
    clock: Callable[[], float] = time.time,
) -> Installed:
    """Export a personal model, verify it against torch, and put it in use as the newest version.

    Args:
        spec: the federation's spec.
        parts: weights of extractor and classifier; other parts are not looked at.
        slots_root: root of this box's versions.
        test_files: held-out image files; without any, random pixels are compared.
        test_labels: index of the right class per file.
        metrics: figures to keep beside the model, by name.
        round_number: the round the weights come from.
        takes: pixels of any size, or normalised ones at the network's size: then there is no preprocessing in the file.
        variants: images to try float16 and int8 by; None for the model as exported alone.
        gate: accuracy that it may lose on the test files against the version in use, as a share; None for no comparison.
        key: file of the device's message key, which signs the manifest; None for an unsigned model.
        clock: seconds since 1970, for the manifest.

    Returns:
        Where it was installed, and its verification.

    Raises:
        NetworkError: weights that do not fit the spec's networks.
        ExportError: the network cannot be written as ONNX, or the ONNX model is not the trained one, or it is worse than the gate
            allows. Nothing was installed then and the version in use stays.
    """
    slots = Slots(slots_root)

    def fill(directory: Path) -> None:
        model_path = directory / MODEL_NAME
        exported = export_personal(spec, parts, model_path, round_number=round_number, takes=takes)
        verification = verify(model_path, spec, parts, test_files, test_labels, takes=takes)
        created = datetime.fromtimestamp(clock(), timezone.utc)
        write_manifest(directory, _manifest(spec, exported, verification, metrics, round_number, takes, created))
        if variants is not None:
            add_variants(directory, variants, threads=torch.get_num_threads())
            verify_variants(directory, test_files, test_labels, threads=torch.get_num_threads())
        if gate is not None:
            passed = pass_gate(directory, slots, test_files, test_labels, gate, threads=torch.get_num_threads())
            write_manifest(directory, read_manifest(directory).model_copy(update={"gate": passed}))
        if key is not None:
            sign_manifest(directory, key)

    model_dir = slots.install(fill)
    manifest = read_manifest(model_dir)
    return Installed(model_dir, manifest.verification, manifest.serves)


def _manifest(
    spec: FederationSpec,
    exported: Exported,
    verification: Verification,
    metrics: Mapping[str, float],
    round_number: int,
    takes: Takes,
    created: datetime,
) -> Manifest:
    return Manifest(
        federation=spec.federation,
        round=round_number,
        spec=spec.digest,
        classes=spec.classes,
        image=spec.image,
        takes=takes,
        model=ModelFile(
            name=MODEL_NAME, sha256=digest(exported.content), size=len(exported.content), opset=exported.opset
        ),
        metrics=dict(metrics),
        verification=verification,
        created=created,
        versions={
            "fedcg-edge": version("fedcg-edge"),
            "torch": str(torch.__version__),
            "onnx": version("onnx"),
            "exporter": exported.exporter,
        },
    )
