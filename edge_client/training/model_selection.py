"""The end of a federation on one device: choose the personal model by validation, export it, measure it. Uses torch.

Up to six candidates: `own`, the personal model of the best validation round; `ema`, the moving average of the latest round's steps, where the
method's parameter `ema` asks for it; `downloaded`, the latest personal model with the parts
that the final aggregate holds taken from it; `tuned`, the downloaded one after one local pass; `interpolated`, the mean of the latest
and the downloaded weights; `averaged`, the mean of the latest and the tuned weights. All are measured alike, on the same validation
images, by their calibrated loss; the least loss is exported. Accuracy on some 200 validation images cannot distinguish candidates
that differ by one to three points, and favours `own`, which is the most accurate of as many rounds there as the federation has;
the loss has less noise. Test and common images are measured for the record and do not influence the choice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from edge_client.session.commands import ChooseModel
from edge_client.store.generations import StoredState
from edge_client.training.evaluation import Measured, measure, with_downloaded
from edge_client.training.local_data import RoundData
from edge_client.training.local_round import as_aggregate, decode_aggregate, load_spec
from edge_client.training.onnx_export import Outcome, common_accuracy, export_model
from edge_client.training.workplace import Workplace
from fedcg.learning.aggregation.averaging import weighted_average
from fedcg.learning.mechanisms.protected_round import downloaded_parts
from fedcg.learning.method import ClientState, DivergedError, Method, Progress, Weights
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.networks.plans import shadow_spec
from fedcg.learning.privacy import OFF
from fedcg.learning.registry import get_method
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_weights
from fedcg.learning.training.evaluation import calibrated_loss, logits_of
from fedcg.learning.training.stage import averaged_parts
from fedcg.wire.parts import Part


@dataclass(frozen=True)
class Candidate:
    """A candidate for the personal model to serve.

    Attributes:
        loss: its calibrated loss on the validation images; None without such images.
    """

    name: str
    parts: Mapping[Part, Weights]
    measured: Measured
    loss: float | None


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The candidate with the least calibrated loss, the first of equals; the first where none could be measured."""
    return min(candidates, key=lambda candidate: math.inf if candidate.loss is None else candidate.loss)


def choose_model(work: Workplace, command: ChooseModel) -> Outcome:
    """Choose, export and describe the personal model; repeats nothing that was done before.

    Raises:
        RoundError: there are no usable images any more.
        WireError: the final aggregate is not usable.
        ExportError: the chosen model can't be exported; none is installed.
    """
    kept = work.store.finalised()
    if kept.get("aggregate") == command.aggregate:
        return kept
    outcome: Outcome = {"aggregate": command.aggregate, "spec": command.spec, "candidate": None}
    stored = work.store.generations.load()
    if stored is not None and stored.generation.spec == command.spec:
        outcome |= _choose(work, command, stored)
    work.store.save_finalised(outcome)
    return outcome


def _choose(work: Workplace, command: ChooseModel, stored: StoredState) -> Outcome:
    spec, method = load_spec(work, command.spec)
    # The round after the last one: the same snapshot as before unless images were added or removed since.
    data, common = work.seen(spec, work.data.for_round(spec, spec.rounds + 1, _sign_of_life(work)))
    work.working()
    candidates = []
    for name, parts in _models(work, command, stored, spec, method, data):
        measured = measure(spec, parts, data, common, work.place)
        loss = calibrated_loss(logits_of(spec, parts, data.val, work.place), data.val.labels) if len(data.val) else None
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
) -> Iterator[tuple[str, Mapping[Part, Weights]]]:
    """The candidates' names and weights."""
    yield "own", to_weights(stored.slots["best"])
    if averaged := averaged_parts(to_weights(stored.extras)):
        yield "ema", averaged
    aggregate = as_aggregate(decode_aggregate(work.store, spec, method, command.aggregate))
    latest = personal_parts(spec, to_weights(stored.slots["personal"]))
    ctx = work.context(spec, spec.rounds + 1, 0, _sign_of_life(work))
    downloaded = with_downloaded(spec, latest, downloaded_parts(latest, aggregate, data.train, ctx))
    if downloaded is None:
        return
    yield "downloaded", downloaded
    if (
        method.personal.predict is not None
    ):  # a mean, or a pass of plain classification, need not be a model of this method
        return
    yield "interpolated", _mean(latest, downloaded)
    try:
        tuned = _one_pass(work, spec, downloaded, data)
    except DivergedError:
        work.events.write("refused", what="tuned", detail="the local pass over the downloaded model diverged")
        return
    yield "tuned", tuned
    yield "averaged", _mean(latest, tuned)


def _sign_of_life(work: Workplace) -> Progress:
    return lambda _phase, _step, _steps: work.working()


def _mean(one: Mapping[Part, Weights], other: Mapping[Part, Weights]) -> dict[Part, Weights]:
    return {part: weighted_average([(1, one[part]), (1, other[part])]) for part in one}


def _one_pass(
    work: Workplace, spec: FederationSpec, parts: Mapping[Part, Weights], data: RoundData
) -> Mapping[Part, Weights]:
    alone = shadow_spec(spec)
    alone = alone.model_copy(update={"params": {**alone.params, "epochs": 1, "steps": 0}})
    # Nothing of this pass is sent, so no mechanism is needed.
    ctx = replace(work.context(spec, spec.rounds + 1, 0, _sign_of_life(work)), spec=alone, privacy=OFF)
    return get_method(alone.method).local_round(ClientState(parts), data.train, None, ctx).private.parts
