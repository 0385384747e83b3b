"""Re-identification: finds the image that the device trained on among many candidates of its class.

From the whole update: the candidate whose label gained the most likelihood in the round (RMIA's ratio, with the
aggregate as reference model). From the gradient of a single image, which reveals the input of the classifier's first
linear layer exactly: candidates are ranked by the distance of their features, from the attacker's extractor, to that
input. PSNR does not show this leak: a picture need not look right to be recognised.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from audit.attacks.attack import Attack, Found, Tick, Trial, ceiling_control
from audit.evidence import Case, Extractor, Knowledge, WholeModel, joined, networks
from audit.measures import Chance, Control, Figure, Measure, Values, proportion, unit_pixels
from audit.techniques import gradients
from audit.techniques.shadow_models import Target, learnt_by_heart, log_ratio
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.parts import Part

_CANDIDATES = 200
_FEWEST = 20
_CONTROL_SHARE, _CONTROL_CHANCE = 0.9, 0.01
_CONTROL_ROWS, _CONTROL_EPOCHS = 64, 100
_ROWS_AT_ONCE = 256
_SURE = 1e-12
_REID = Measure("reid", "Re-identification: the right image ranked first", "share")


class LineUp(Value):
    """One image among its candidates.

    Attributes:
        right: the image's row of the pool; `rows`: [candidates] rows of all candidates, in the pool's order.
    """

    right: int
    rows: torch.Tensor


def distances(
    spec: FederationSpec,
    model: WholeModel,
    seen: Sequence[gradients.BatchGradient],
    pool: torch.Tensor,
    rows: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """Attack a gradient: return the distance of each candidate's features to those of the observed image, [candidates] per gradient.

    Both are standardised map by map: with an estimated extractor, raw distances find far fewer images.

    Args:
        spec: of the federation.
        model: the classifier behind the attacker's extractor.
        seen: gradients of single images.
        pool: [P, C, H, W] in [0, 1].
        rows: the candidates of every gradient, as rows of the pool.
    """
    with torch.no_grad():
        features = torch.cat([gradients.linear_inputs(model, block) for block in pool.split(_ROWS_AT_ONCE)])
    features = gradients.standardised(features, spec)
    wanted = gradients.standardised(torch.stack([gradients.revealed_features(model, one) for one in seen]), spec)
    return [(features[some] - one).square().sum(1) for one, some in zip(wanted, rows, strict=True)]


def rises(target: Target, pool: ImageSet, line_ups: Sequence[LineUp], streams: Streams) -> list[torch.Tensor]:
    """Attack the whole update: return the negative rise of each candidate's label likelihood, [candidates] per line-up."""
    ratios = torch.from_numpy(log_ratio(target, pool, streams))
    return [-ratios[one.rows] for one in line_ups]


def ranks(found: Sequence[torch.Tensor], line_ups: Sequence[LineUp]) -> Values:
    """Return the rank of the right candidate, [N]; 1 is best; candidates at the same distance count as nearer."""
    pairs = [(some, some[one.rows == one.right]) for some, one in zip(found, line_ups, strict=True)]
    return np.array([float((some <= right + _SURE * right.abs()).sum()) for some, right in pairs])


def _uniform_chance(places: Values, line_ups: Sequence[LineUp]) -> Chance:
    """Return the probability of as many right images at rank 1 if every candidate is as likely, for independent line-ups."""
    counts = np.ones(1)
    for one in line_ups:
        counts = np.convolve(counts, [1 - 1 / len(one.rows), 1 / len(one.rows)])
    return Chance(min(1.0, float(counts[int((places == 1).sum()) :].sum())), float(counts[-1]))


def chance_of_update(
    found: Sequence[torch.Tensor], line_ups: Sequence[LineUp], labels: torch.Tensor, device: int
) -> Chance:
    """Return the probability of as many right images at rank 1 if "trained on" were assigned at random among the device's images of each class.

    The images of a class share their other candidates, so one of these with a high score keeps all from rank 1: ranks are
    not independent. A training image is at rank 1 exactly if it is above all others of the device that were not trained
    on (of n and m images in random order, Pr(at least k before the first of the m) = n! (n + m - k)! / ((n - k)! (n + m)!)),
    and above the auxiliary images, whose scores are taken as they are.

    Args:
        found: of `rises`.
        line_ups: in the same order.
        labels: of the pool.
        device: number of the device's images, which are first in the pool.
    """
    hits, counts, least = int((ranks(found, line_ups) == 1).sum()), np.ones(1), 1.0
    by_class: dict[int, list[tuple[torch.Tensor, LineUp]]] = {}
    for some, one in zip(found, line_ups, strict=True):
        by_class.setdefault(int(labels[one.right]), []).append((some, one))
    for group in by_class.values():
        (some, one), *_ = group
        is_other = one.rows != one.right
        others, is_own = some[is_other], one.rows[is_other] < device
        mine = torch.cat([each[line_up.rows == line_up.right] for each, line_up in group])
        nearest = others[~is_own].min() if not is_own.all() else torch.tensor(torch.inf)
        above = int((mine < nearest).sum() + (others[is_own] < nearest).sum())
        number, all_own = np.arange(len(mine)), len(mine) + int(is_own.sum())
        at_least = np.concatenate([[1.0], np.cumprod((len(mine) - number) / (all_own - number))])
        at_least, least = at_least[: above + 1], least * float(at_least[-1])
        counts = np.convolve(counts, at_least - np.append(at_least[1:], 0.0))
    return Chance(min(1.0, float(counts[hits:].sum())), least)


def _line_ups(pool: ImageSet, wanted: Sequence[int], first: int, streams: Streams) -> list[LineUp]:
    """Return, for each wanted row of the pool, up to 200 rows of its class, the others from row `first` on; none if fewer than 20.

    The other candidates are the same for every wanted row of a class.
    """
    found = []
    shuffled = torch.randperm(len(pool), generator=streams.generator("candidates"))
    shuffled = shuffled[shuffled >= first]
    for row in wanted:
        others = shuffled[(pool.labels[shuffled] == pool.labels[row]) & (shuffled != row)]
        rows = torch.cat([others[: _CANDIDATES - 1], torch.tensor([row])]).sort().values
        if len(rows) >= _FEWEST:
            found.append(LineUp(row, rows))
    return found


def _pool(case: Case) -> ImageSet:
    """Return the device's training images first, then images that were not trained on."""
    known = joined(case.truth.train, case.truth.held_out)
    return known if case.view.auxiliary is None else joined(known, case.view.auxiliary)


def _figures(
    what: str, observed: Knowledge, found: Mapping[Extractor, tuple[Values, Chance]], line_ups: Sequence[LineUp]
) -> Iterator[Figure]:
    """Yield a figure for the ranks and their chance with every extractor; that of the device's own extractor is the ceiling."""
    sizes = [len(one.rows) for one in line_ups]
    ceiling = next((float((places == 1).mean()) for source, (places, _) in found.items() if source.is_own), None)
    for source, (places, likely) in found.items():
        yield _REID.figure(
            f"{what} among {min(sizes)} to {max(sizes)} candidates of its class, extractor {source.value}",
            {observed, Knowledge.BEFORE, Knowledge.CANDIDATES, *source.knowledge},
            proportion(int((places == 1).sum()), len(places)),
            ("a random candidate of the class", float(np.mean([1 / size for size in sizes]))),
            len(line_ups),
            ceiling=None if source is Extractor.TRUE else ceiling,
            chance=likely,
        )


def _sources(case: Case) -> tuple[Extractor, ...]:
    """Return the extractors to try, the strongest first."""
    given = () if case.truth.before is None else (Extractor.TRUE,)
    blind = (Extractor.RANDOM, Extractor.START, Extractor.SURROGATE)
    return case.view.extractors(*given, Extractor.COLLUDER, *blind)


def _before(case: Case, source: Extractor, streams: Streams, epochs: int) -> WholeModel:
    """Return the attacker's model at the start of the round."""
    view = case.view.with_private((case.truth.before or {}) if source is Extractor.TRUE else {})
    return gradients.attacker_model(view, source, streams, epochs)


def _round_of(case: Case, source: Extractor, before: WholeModel) -> Target | None:
    """Return the attacker's models of the whole update; None with a random extractor, and if the true one was not given."""
    view, sent = case.view, case.view.update[Part.CLASSIFIER]
    extractors = (case.truth.after or {}) if source is Extractor.TRUE else view.update
    if Part.EXTRACTOR in extractors:
        after = networks.whole_model(view.spec, {**extractors, Part.CLASSIFIER: sent})
    elif source in (Extractor.START, Extractor.SURROGATE, Extractor.COLLUDER):
        after = replace(before, classifier=load_part(view.spec, Part.CLASSIFIER, sent).eval())
    else:
        return None
    return Target(after, None, (before,), (), case.truth.held_out)


def _gradients(case: Case, pool: ImageSet, line_ups: Sequence[LineUp], tick: Tick) -> Iterator[gradients.BatchGradient]:
    """Yield the gradient of each line-up's right image, at the round's start."""
    view, true = case.view, case.model()
    for one in line_ups:
        assert true is not None
        row = slice(one.right, one.right + 1)
        parts = (Part.EXTRACTOR, Part.CLASSIFIER)[not view.shares_extractor :]
        yield gradients.batch_gradient(view.spec, true, unit_pixels(pool.images[row]), pool.labels[row], parts)
        tick()


def _control_of_update(case: Case, pool: ImageSet, rows: Sequence[int], streams: Streams) -> Control:
    """Run the same attack on a whole model that memorised a few images with random labels: only memorising explains a rise."""
    labels = torch.randint(len(pool.classes), (len(pool),), generator=streams.generator("labels"))
    pool = replace(pool, labels=labels)
    whole = replace(case, view=learnt_by_heart(case.view, pool.rows(rows), _CONTROL_EPOCHS, streams))
    target = _round_of(whole, Extractor.SENT, _before(whole, Extractor.SENT, streams, 0))
    assert target is not None
    line_ups = _line_ups(pool, rows, len(case.truth.train), streams)
    found = rises(target, pool, line_ups, streams)
    share = float((ranks(found, line_ups) == 1).mean())
    likely = chance_of_update(found, line_ups, pool.labels, len(case.truth.train) + len(case.truth.held_out)).p
    title = f"share ranked first, from the update of a whole model that memorised {len(rows)} images with random labels"
    return Control(title, share, "above chance (p below 1 %)", likely < _CONTROL_CHANCE)


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, effort, streams = trial.case, trial.effort, trial.streams
    pool, count = _pool(case), len(case.truth.train)
    order = torch.randperm(count, generator=streams.generator("images")).tolist()
    of_update = _line_ups(pool, order[: effort.of(400, 2000, 10_000)], count, streams.at("update"))
    missing = case.lacks(private=True) or gradients.lacks_closed_form(case.view.spec)
    of_gradient = [] if missing else _line_ups(pool, order[: effort.of(40, 200, 1000)], 0, streams)
    sources = _sources(case)
    tick = trial.steps(len(of_gradient) + len(sources) + 1)
    seen, pixels = list(_gradients(case, pool, of_gradient, tick)), unit_pixels(pool.images)
    whole, single, own = {}, {}, count + len(case.truth.held_out)
    for source in sources:
        before = _before(case, source, streams, effort.of(5, 20, 60))
        target = _round_of(case, source, before)
        if target is not None:
            found = rises(target, pool, of_update, streams)
            whole[source] = ranks(found, of_update), chance_of_update(found, of_update, pool.labels, own)
        if seen:
            found = distances(case.view.spec, before, seen, pixels, [one.rows for one in of_gradient])
            places = ranks(found, of_gradient)
            single[source] = places, _uniform_chance(places, of_gradient)
        tick()
    yield _control_of_update(case, pool, order[:_CONTROL_ROWS], streams.at("control"))
    tick()
    yield from _figures("whole update: one image", Knowledge.UPDATE, whole, of_update)
    true = [(float((places == 1).mean()), likely.p) for source, (places, likely) in whole.items() if source.is_own]
    yield from ceiling_control(case, _REID.name, *(true[0][0], [true[0][1]]) if true else (0.0, []))
    yield "Candidates are the device's held-out images and the auxiliary images; for gradients also its training images."
    if single:
        yield from _figures("one image's gradient", Knowledge.BATCH, single, of_gradient)
        best = float((single[sources[0]][0] == 1).mean())
        title = f"share ranked first, from a gradient with the right extractor ({len(of_gradient)} images)"
        yield Control(title, best, f"at least {_CONTROL_SHARE:.0%}", best >= _CONTROL_SHARE)
        means = "; ".join(f"{source.value} {(1 / some).mean():.3f}" for source, (some, _) in single.items())
        yield f"Mean reciprocal rank from one image's gradient, by extractor: {means}."
    if missing:
        yield f"Gradients of single images were not tried: {missing}."


def _lacks(case: Case) -> str | None:
    pool, count = _pool(case), len(case.truth.train)
    unseen = torch.bincount(pool.labels[count:], minlength=len(pool.classes))
    if max(unseen[label] for label in case.truth.train.labels.unique()) < _FEWEST - 1:
        return f"no class of the device has {_FEWEST - 1} images that it did not train on: give more with --held-out or --auxiliary"
    return None


ATTACK = Attack(
    "reidentification",
    "Re-identification",
    "Can someone with a list of images find out which of them the device trained on?",
    "rise of the label's posterior; closed form of the first linear layer (Geiping 2020, proposition 3.1)",
    _carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    lacking=_lacks,
)
