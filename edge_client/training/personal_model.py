"""A device's personal model: exported after a round that improved it; chosen, exported and measured at the end. Uses torch.

At the end there are up to six candidates. `own`: the personal model of the best validation round. `ema`: the moving average of the latest
round's steps, if the method's parameter `ema` is set. `downloaded`: the latest personal model with the final aggregate's parts. `tuned`: the
downloaded model after one local pass. `interpolated`: the mean of the latest and the downloaded weights. `averaged`: the mean of the latest and
the tuned weights. All are evaluated on the same validation images. The one with the lowest calibrated loss is exported. Accuracy on about 200
validation images can't distinguish candidates that differ by one to three points, and favours `own`. The loss has less noise. Test and common
images are only measured for the record.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from edge_client.session.signals import ChooseModel
from edge_client.store.generations import Snapshot, StoredState
from edge_client.store.private_store import FINALISED_FILE
from edge_client.training.local_data import RoundData
from edge_client.training.local_round import as_aggregate, decode_aggregate, load_spec
from edge_client.training.workplace import Measured, Workplace, measure, with_downloaded
from export.build.install_model import package_personal
from export.build.variants import CALIBRATION_IMAGES, HeldOut
from export.errors import GateError
from export.model.manifest import Manifest, read_manifest
from export.model.runtime import Model, load_all
from export.model.versions import ModelVersions
from fedcg.event_log import EventValue
from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.mechanisms.protected_round import downloaded_parts
from fedcg.learning.method import ClientState, DivergedError, Method, Parts, Progress, Weights
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.networks.plans import shadow_spec
from fedcg.learning.privacy import OFF
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.learning.training.evaluation import loss_to_choose_by
from fedcg.learning.training.stage import averaged_parts
from fedcg.learning.training.task_round import task_of
from fedcg.values import Value
from fedcg.wire.parts import Part

Outcome = dict[str, EventValue]


def export_best(work: Workplace) -> None:
    """Export and deploy the best model so far, if the last committed round improved it.

    Raises:
        ExportError: the export failed; the deployed version stays.
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
    parts: Parts,
    measured: Measured,
    snapshot: Snapshot,
    *,
    last: bool = False,
) -> Outcome:
    """Export and deploy a personal model, unless the deployed one is better on this device's test images.

    Args:
        work: the context of the device's local work.
        spec: the federation's spec.
        round_number: the round the weights come from.
        parts: extractor and classifier.
        measured: their accuracies, for the manifest.
        snapshot: the images or tensors of each split.
        last: also try variants, if configured.

    Returns:
        The deployed version, for the events; `gate` is the reason why the new model was not deployed.

    Raises:
        ExportError: the export failed; the deployed version stays.
    """
    files, labels = work.data.samples(spec, snapshot, "test")
    layer = work.data.input_layer(spec)
    slots = ModelVersions(work.store.root / "models")
    # Removing a device's data makes the model of an exact method worse.
    gate = None if spec.is_exact else work.config.export.gate_points / 100
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
            gate=gate,
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
    """Accuracy of an installed model on the common test set's image files or tensors; None without them."""
    files, labels = work.data.common_samples(spec)
    if not files:
        return None
    model = Model.load(directory, threads=work.threads)
    predicted = model.predict(load_all(files, model.manifest.input)).argmax(axis=1)
    return float((predicted == labels).mean())


def _held_out(work: Workplace, spec: FederationSpec, snapshot: Snapshot) -> HeldOut | None:
    """The samples for comparing variants (validation) and calibrating them (training). None without image files or tensors."""
    files, labels = work.data.samples(spec, snapshot, "val")
    seen, _ = work.data.samples(spec, snapshot, "train")
    if not files or not seen:
        return None
    some = seen[:: max(1, len(seen) // CALIBRATION_IMAGES)][:CALIBRATION_IMAGES]
    return HeldOut(load_all(files, spec.input), labels, load_all(some, spec.input))


class Candidate(Value):
    """A candidate for the deployed model.

    Attributes:
        loss: its calibrated loss on the validation images; None without validation images.
    """

    name: str
    parts: Parts
    measured: Measured
    loss: float | None


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the lowest calibrated loss. The first one wins ties, and if no loss could be measured."""
    return min(candidates, key=lambda candidate: math.inf if candidate.loss is None else candidate.loss)


def choose_model(work: Workplace, command: ChooseModel) -> Outcome:
    """Choose, export and describe the personal model. Returns the saved outcome if this was done before.

    Raises:
        RoundError: no usable images are left.
        WireError: the final aggregate can't be used.
        ExportError: the chosen model can't be exported, so no model is installed.
    """
    kept = work.store.record(FINALISED_FILE)
    if kept.get("aggregate") == command.aggregate:
        return kept
    outcome: Outcome = {"aggregate": command.aggregate, "spec": command.spec, "candidate": None}
    stored = work.store.generations.load()
    if stored is not None and stored.generation.spec == command.spec:
        outcome |= _choose(work, command, stored)
    work.store.save_record(FINALISED_FILE, outcome)
    return outcome


def _choose(work: Workplace, command: ChooseModel, stored: StoredState) -> Outcome:
    spec, method = load_spec(work, command.spec)
    # The round after the last one. Its snapshot is the same unless images were added or removed since.
    data, common = work.seen(spec, work.data.for_round(spec, spec.rounds + 1, _sign_of_life(work)))
    work.working()
    candidates = []
    for name, parts in _models(work, command, stored, spec, method, data):
        measured = measure(spec, parts, data, common, work.place)
        loss = loss_to_choose_by(spec, parts, data.val, work.place) if len(data.val) else None
        candidates.append(Candidate(name, parts, measured, loss))
    chosen = choose(candidates)
    scores = stored.generation.scores
    shadow = Measured.from_scores(scores, "best_shadow")
    outcome: Outcome = {
        "candidate": chosen.name,
        "round": stored.generation.round_attempt.round,
        "best_round": int(scores["best.round"]),
        "accuracy_personal": chosen.measured.test,
        "accuracy_common_personal": chosen.measured.common,
        "accuracy_val_personal": chosen.measured.val,
        "accuracy_local": shadow.test,
        "accuracy_common_local": shadow.common,
        **{f"{split}_images": count for split, count in data.snapshot.counts().items()},
        **{f"accuracy_{candidate.name}": candidate.measured.test for candidate in candidates},
        **{f"accuracy_common_{candidate.name}": candidate.measured.common for candidate in candidates},
        **{f"accuracy_val_{candidate.name}": candidate.measured.val for candidate in candidates},
        **{f"loss_val_{candidate.name}": candidate.loss for candidate in candidates},
    }
    if work.config.export.enabled:
        work.working()
        exported = export_model(
            work, spec, stored.generation.round_attempt.round, chosen.parts, chosen.measured, data.snapshot, last=True
        )
        outcome |= exported | {"accuracy_common_onnx": common_accuracy(work, spec, Path(str(exported["model_dir"])))}
    return outcome


def _models(
    work: Workplace, command: ChooseModel, stored: StoredState, spec: FederationSpec, method: Method, data: RoundData
) -> Iterator[tuple[str, Parts]]:
    """The candidates' names and weights."""
    yield "own", to_weights(stored.slots["best"])
    if averaged := averaged_parts(to_weights(stored.extras)):
        yield "ema", averaged
    decoded = decode_aggregate(work.store, spec, method, command.aggregate)
    aggregate = as_aggregate(work, spec, decoded, decoded.header.round, has_state=True)
    latest = personal_parts(spec, to_weights(stored.slots["personal"]))
    ctx = work.context(spec, decoded.header.round + 1, 0, _sign_of_life(work))
    ctx = replace(ctx, validation=data.val)
    downloaded = with_downloaded(spec, latest, downloaded_parts(latest, aggregate, data.train, ctx))
    if downloaded is None:
        return
    yield "downloaded", downloaded
    if method.personal.predict is not None or not aggregate.parts.keys() & latest.keys():
        # a mean or a plain classification pass may not be a valid model of this method, or may harm a closed-form head
        return
    yield "interpolated", _mean(latest, downloaded)
    if task_of(spec) is not None:  # a trainer's round is too long for this
        return
    try:
        tuned = _one_pass(work, spec, downloaded, data)
    except DivergedError:
        work.events.write("refused", what="tuned", detail="the local pass on the downloaded model diverged")
        return
    yield "tuned", tuned
    yield "averaged", _mean(latest, tuned)


def _sign_of_life(work: Workplace) -> Progress:
    return lambda _phase, _step, _steps: work.working()


def _mean(one: Parts, other: Parts) -> dict[Part, Weights]:
    return {part: weighted_average([(1, one[part]), (1, other[part])]) for part in one}


def _one_pass(work: Workplace, spec: FederationSpec, parts: Parts, data: RoundData) -> Parts:
    alone = shadow_spec(spec)
    alone = alone.model_copy(update={"params": {**alone.params, "epochs": 1, "steps": 0}})
    # Nothing of this pass is sent, so no privacy mechanism is needed.
    ctx = replace(work.context(spec, spec.rounds + 1, 0, _sign_of_life(work)), spec=alone, privacy=OFF)
    return get_method(alone.method).local_round(ClientState(parts), data.train, None, ctx).private.parts
