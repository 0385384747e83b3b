"""fedseal: FedAvg with sealed extractors, whose mean only the cohort can read, and a head calibrated on virtual features.

Our own method. Extractors are averaged sealed and classifiers in the clear, so accuracy equals FedAvg's by
construction. Every second round exchanges sealed moments of the mean extractor's features, without training; from these
each client calibrates the averaged classifier (CCVR, Luo et al. 2021). Clients vote before each sum, on the aggregate
that the round starts from:

  * all use the calibrated classifier if most clients' validation losses fall;
  * a mean is rolled back if, with the better of both classifiers, its loss on most clients' validation images is higher
    than that of the parts they trained from. All then continue from those parts. This is needed because sealed weights
    can't be inspected. (A head that a client fits to the features itself is a weaker test. The features of a corrupted
    extractor still fit a few dozen images.)
  * if the images of half of the clients come from another domain, so that the mean fits them far worse than their own
    models, all keep their own extractors and share only the classifiers.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from pydantic import Field

from fedcg.learning import method as fl
from fedcg.learning.data.image_folder import usable_rows
from fedcg.learning.errors import PrivacyError
from fedcg.learning.heads.classifiers import calibrated
from fedcg.learning.heads.moments import CLIP, Clip, class_gaussians, feature_moments, moments_layout
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.protected_round import personal_parts
from fedcg.learning.methods._averaging import PERSONAL, MomentumParams, average_of, averaged_round
from fedcg.learning.networks import load_part
from fedcg.learning.training.evaluation import loss_to_choose_by
from fedcg.wire.parts import Part, Report

CALIBRATED, UNUSABLE, OTHER_KIND, JUDGED = 1, 2, 4, 8
"""Bits of a vote: calibration lowers the loss; the mean is unusable; the images are of another domain; validation was possible."""
TRAINED_FROM = "trained-from-"
"""Prefix of a part's name in `ClientState.extras`: the weights that the last training round started from."""


class FedsealParams(fl.TrainingParams):
    """Parameters of training as in FedAvg, with defaults that suit averaging, and the thresholds of the votes."""

    average: fl.Average = "mean"
    clip: Clip = CLIP
    aux: float = Field(default=1.0, ge=0, description=MomentumParams.model_fields["aux"].description)
    ema: float = Field(default=0.998, ge=0, lt=1, description=MomentumParams.model_fields["ema"].description)
    server_momentum: float = Field(
        default=0.3, ge=0, lt=1, description=MomentumParams.model_fields["server_momentum"].description
    )
    calibrate: bool = Field(default=True, description="whether to use the calibrated classifier if most clients gain")
    unusable: float = Field(
        default=1.05,
        gt=1,
        description="a mean is unusable if its validation loss exceeds this multiple of the loss of the parts it was trained from",
    )
    other_kind: float = Field(
        default=1.4,
        gt=1,
        description="domains differ if the mean's validation loss exceeds this multiple of the client's own model's",
    )


_train = averaged_round(FedsealParams, PERSONAL, None, fl.LabelCounts.NEVER)


def align(own: fl.Parts, aggregate: fl.Aggregate, data: ImageSet, ctx: fl.RoundContext) -> fl.Parts:
    """The own extractor if the cohort's domains differ, and the calibrated classifier if most clients gain (without votes: this client)."""
    if not aggregate.parts.keys() >= PERSONAL:
        return {}
    head = _calibrated(aggregate, ctx)
    votes = ctx.cohort.votes or {"": _bits(fl.ClientState(own), aggregate, head, data, ctx)}
    changed = {Part.EXTRACTOR: own[Part.EXTRACTOR]} if _share(votes, OTHER_KIND) >= 0.5 else {}
    if _share(votes, CALIBRATED) > 0.5:
        plain = {**aggregate.parts, **changed}
        # Votes bind all clients: updates from different starting points look like hostile ones.
        if ctx.cohort.votes or _loss({**plain, **head}, data, ctx) < _loss(plain, data, ctx):
            changed |= head
    return changed


def vote(state: fl.ClientState, aggregate: fl.Aggregate, data: ImageSet, ctx: fl.RoundContext) -> int:
    """This client's vote on the aggregate, from its validation images; 0 without any."""
    is_judged = ctx.round > 1 and aggregate.parts.keys() >= PERSONAL
    return _bits(state, aggregate, _calibrated(aggregate, ctx), data, ctx) if is_judged else 0


def _bits(state: fl.ClientState, aggregate: fl.Aggregate, head: fl.Parts, data: ImageSet, ctx: fl.RoundContext) -> int:
    params = FedsealParams.model_validate(ctx.spec.params)
    if ctx.validation is None or not len(ctx.validation):
        return 0
    before, loss = _trained_from(state), _loss(aggregate.parts, data, ctx)
    as_calibrated = _loss({**aggregate.parts, **head}, data, ctx)
    with_own = {**aggregate.parts, Part.EXTRACTOR: state.parts[Part.EXTRACTOR]}
    with_head = min(as_calibrated, _loss({**with_own, **head}, data, ctx))
    found = {
        # With the better classifier: the starting parts may have had a calibrated one too.
        UNUSABLE: bool(before) and min(loss, as_calibrated) > params.unusable * _validation_loss(before, ctx),
        OTHER_KIND: min(loss, _own_shares_loss(aggregate.parts, data, ctx))
        > params.other_kind * _validation_loss(state.parts, ctx),
        CALIBRATED: bool(head) and with_head < min(loss, _loss(with_own, data, ctx)),
    }
    return JUDGED | sum(bit for bit, is_so in found.items() if is_so)


def _share(votes: Mapping[str, int], bit: int) -> float:
    """The share of clients that set a bit, among those that could validate; 0 if these are less than a third of all."""
    judges = [given for given in votes.values() if given & JUDGED]
    return sum(bool(given & bit) for given in judges) / len(judges) if 3 * len(judges) >= max(1, len(votes)) else 0.0


def _calibrated(aggregate: fl.Aggregate, ctx: fl.RoundContext) -> dict[Part, fl.Weights]:
    """The aggregate's classifier, calibrated; empty if its moments belong to another extractor or are unusable."""
    params = FedsealParams.model_validate(ctx.spec.params)
    if not params.calibrate or ctx.spec.trains_in(ctx.round - 1) or Part.STATISTICS not in aggregate.parts:
        return {}
    try:
        asked = _digest_of(aggregate, ctx)
        if asked not in _LATEST and (classes := class_gaussians(aggregate.parts[Part.STATISTICS])) is not None:
            found = calibrated(aggregate.parts[Part.CLASSIFIER], classes, params.lr, ctx)
            _LATEST.clear()
            _LATEST[asked] = found
        return {Part.CLASSIFIER: dict(_LATEST[asked])} if asked in _LATEST else {}
    except fl.DivergedError as error:
        ctx.callbacks.warn(f"{error}: the averaged classifier is used without calibration")
        return {}


_LATEST: dict[bytes, fl.Weights] = {}
"""The last calibrated classifier, keyed by all its inputs. A round needs the same one up to three times, as does each simulated client."""


def _digest_of(aggregate: fl.Aggregate, ctx: fl.RoundContext) -> bytes:
    found = hashlib.sha256(repr((ctx.spec.digest, ctx.round, ctx.device, ctx.cohort.streams)).encode())
    for part in (Part.CLASSIFIER, Part.STATISTICS):
        for _, tensor in sorted(aggregate.parts[part].items()):
            found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.digest()


def _loss(parts: fl.Parts, data: ImageSet, ctx: fl.RoundContext) -> float:
    """The validation loss of an aggregate's parts, as this client uses them."""
    return _validation_loss(personal_parts({part: parts[part] for part in PERSONAL}, data, ctx), ctx)


def _own_shares_loss(parts: fl.Parts, data: ImageSet, ctx: fl.RoundContext) -> float:
    """The same with this client's label shares in the classifier's last bias: other shares are not another domain."""
    try:
        return _loss(parts, data, replace(ctx, privacy=ctx.privacy.model_copy(update={"balance": "logits"})))
    except PrivacyError:  # the classifier has no last bias
        return math.inf


def _validation_loss(parts: fl.Parts, ctx: fl.RoundContext) -> float:
    if ctx.validation is None or not len(ctx.validation):
        return 0.0
    found = loss_to_choose_by(ctx.spec, parts, ctx.validation, ctx.device)
    return math.inf if math.isnan(found) else found  # overflowing logits


def _trained_from(state: fl.ClientState) -> dict[Part, fl.Weights]:
    """The starting parts of the last training round, as this client uses them; empty before the first, or with its own extractor."""
    found = {part: state.extras.get(TRAINED_FROM + part.value, {}) for part in sorted(PERSONAL)}
    return found if all(found.values()) else {}


def local_round(
    state: fl.ClientState, data: ImageSet, aggregate: fl.Aggregate | None, ctx: fl.RoundContext
) -> fl.LocalResult:
    """Train as in FedAvg. In every second round, compute the moments of the aggregate's features instead."""
    down = {} if aggregate is None else aggregate.parts
    start = {part: down.get(part, state.parts[part]) for part in sorted(PERSONAL)}
    if not ctx.spec.trains_in(ctx.round):
        return _moments_of(state, start, data, ctx)
    if (before := _trained_from(state)) and _share(ctx.cohort.votes, UNUSABLE) > 0.5:
        ctx.callbacks.warn("most devices rejected the new mean: this round continues from the previous one")
        start = before
    result = _train(fl.ClientState(start), data, None if aggregate is None else fl.Aggregate(start), ctx)
    # If `align` kept the own extractor and there was no rollback, there is no mean to roll back.
    is_own = ctx.round > 1 and Part.EXTRACTOR in down and start[Part.EXTRACTOR] is state.parts[Part.EXTRACTOR]
    kept = {
        TRAINED_FROM + part.value: start[part] for part in sorted(PERSONAL) if part is Part.CLASSIFIER or not is_own
    }
    parts = {**result.private.parts, Part.STATISTICS: state.parts[Part.STATISTICS]}
    return replace(result, private=fl.ClientState(parts, {**result.private.extras, **kept}))


def _moments_of(state: fl.ClientState, start: fl.Parts, data: ImageSet, ctx: fl.RoundContext) -> fl.LocalResult:
    usable_rows(len(data), 2)
    if ctx.cohort.changed:
        rows = torch.randperm(len(data), generator=ctx.streams.generator("half"))
        data = data.rows(rows[: math.ceil(len(data) / 2)])
    moments = feature_moments(load_part(ctx.spec, Part.EXTRACTOR, start[Part.EXTRACTOR], ctx.device), data, ctx)
    # A client that never trained has no better model than the mean.
    own = state.parts if state.extras else {**state.parts, **start}
    private = {**own, Part.STATISTICS: {name: tensor.clone() for name, tensor in moments.items()}}
    shared = fl.SharedResult({Part.STATISTICS: moments})
    return fl.LocalResult(shared, replace(state, parts=private), Report(examples=len(data)))


def aggregator(state: fl.ServerState, ctx: fl.RoundContext, spill: fl.Spill) -> fl.Aggregator:
    """The average of the classifiers, with momentum."""
    return average_of(FedsealParams, PERSONAL, state, ctx, spill)


SHARED = PERSONAL | {Part.STATISTICS}
METHOD = fl.Method(
    name="fedseal",
    title="FedAvg with sealed extractors, and a classifier calibrated on virtual features",
    params_type=FedsealParams,
    payload=fl.Payload(
        SHARED,
        SHARED,
        continued=PERSONAL,
        statistics=moments_layout,
        sealed=SHARED - {Part.CLASSIFIER},
        sealable=frozenset({Part.CLASSIFIER}),
        alternates=True,
    ),
    needs=fl.Needs(cohort=True),
    personal=fl.Personal(align=align),
    vote=vote,
    local_round=local_round,
    aggregator=aggregator,
)
