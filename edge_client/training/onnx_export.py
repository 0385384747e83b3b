"""A device's personal model to its versions of ONNX models: after a round that made it better, and at the end. Uses torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_client.store.generations import Snapshot
from edge_client.training.evaluation import Measured
from edge_client.training.local_round import load_spec
from edge_client.training.workplace import Workplace
from export.build.install_model import package_personal
from export.build.variants import CALIBRATION_IMAGES, HeldOut
from export.errors import GateError
from export.model.manifest import Manifest, read_manifest
from export.model.preprocess import load_image
from export.model.runtime import Model
from export.model.versions import Slots
from fedcg.event_log import EventValue
from fedcg.learning.method import Weights
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.parts import Part

Outcome = dict[str, EventValue]


def export_best(work: Workplace) -> None:
    """Export the best model so far, if the round that was committed last made it better, and put it in use.

    Raises:
        ExportError: it can't be exported; the version in use stays.
    """
    stored = work.store.generations.load()
    if stored is None or int(stored.generation.scores["best.round"]) != stored.generation.round_attempt.round:
        return
    generation = stored.generation
    spec, _ = load_spec(work, generation.spec)
    measured = Measured.from_scores(generation.scores, "best")
    parts = to_weights(stored.slots["best"])
    snapshot = work.store.generations.snapshot(generation)
    outcome = export_model(work, spec, generation.round_attempt.round, parts, measured, snapshot)
    work.events.write("exported", round=generation.round_attempt.round, **outcome)


def export_model(
    work: Workplace,
    spec: FederationSpec,
    round_number: int,
    parts: Mapping[Part, Weights],
    measured: Measured,
    snapshot: Snapshot,
    *,
    last: bool = False,
) -> Outcome:
    """Export a personal model and put it in use, unless the one in use is better on this device's test images.

    Args:
        work: the context of the device's local work.
        spec: the federation's spec.
        round_number: the round the weights come from.
        parts: extractor and classifier.
        measured: their accuracies, for the manifest.
        snapshot: the images of each split.
        last: also try variants, where the configuration asks for them.

    Returns:
        The version in use now, for the events; `gate` is the reason why the new model is not.

    Raises:
        ExportError: it can't be exported; the version in use stays.
    """
    files, labels = work.data.files(snapshot, "test")
    layer = work.data.input_layer(spec)
    slots = Slots(work.store.root / "models")
    refused = None
    try:
        package_personal(
            spec,
            parts,
            slots.root,
            test_files=files,
            test_labels=labels,
            metrics={f"accuracy_{name}": value for name, value in measured.as_scores("personal").items()},
            round_number=round_number,
            variants=_held_out(work, spec, snapshot) if last and work.config.export.variants else None,
            gate=work.config.export.gate_points / 100,
            key=work.config.keys.signing,
            before=None if layer is None else layer.layer(spec.image),
        )
    except GateError as error:
        refused = str(error)
    directory = slots.current()
    return {"gate": refused, **_described(directory, read_manifest(directory))}


def _described(directory: Path, manifest: Manifest) -> Outcome:
    return {
        "model_dir": str(directory),
        "onnx_model": str(directory / manifest.model.name),
        "served_variant": manifest.serves,
        "accuracy_onnx": manifest.verification.accuracy_onnx,
        "onnx_top1_agreement": manifest.verification.top1_agreement,
    }


def common_accuracy(work: Workplace, spec: FederationSpec, directory: Path) -> float | None:
    """Share of the common test set's image files that an installed model gets right; None without such files."""
    files, labels = work.data.common_files(spec)
    if not files:
        return None
    model = Model.load(directory, threads=work.threads)
    predicted = model.predict([load_image(file, model.manifest.image) for file in files]).argmax(axis=1)
    return float((predicted == labels).mean())


def _held_out(work: Workplace, spec: FederationSpec, snapshot: Snapshot) -> HeldOut | None:
    """Images that variants are compared on (validation) and calibrated with (training). None where there are no image files."""
    files, labels = work.data.files(snapshot, "val")
    seen, _ = work.data.files(snapshot, "train")
    if not files or not seen:
        return None
    some = seen[:: max(1, len(seen) // CALIBRATION_IMAGES)][:CALIBRATION_IMAGES]
    return HeldOut(
        [load_image(one, spec.image) for one in files], labels, [load_image(one, spec.image) for one in some]
    )
