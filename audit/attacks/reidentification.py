"""Re-identification: which of many candidate images of a class is the one whose gradient was observed.

The gradient of a single image gives away the input of the classifier's first linear layer exactly; candidates are ranked by how near their
features, through the attacker's extractor, come to it. PSNR does not show this leak: a picture need not look right to be recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from audit.attacks.attack import Attack, Effort, Progress
from audit.evidence.case import Case, Knowledge, View
from audit.evidence.device_data import joined
from audit.evidence.networks import Extractor, WholeModel
from audit.evidence.observed_gradient import BatchGradient, batch_gradient
from audit.measures.figures import Control, Figure, Interval, Outcome
from audit.measures.images import unit_pixels
from audit.measures.statistics import Values, proportion
from audit.techniques.closed_form import (
    attacker_model,
    lacks_closed_form,
    linear_inputs,
    revealed_features,
    standardised,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

_CANDIDATES = 200
_FEWEST = 20
_CONTROL_SHARE = 0.9
_ROWS_AT_ONCE = 256
_SURE = 1e-12


@dataclass(frozen=True)
class LineUp:
    """One image and those that it is among.

    Attributes:
        right: its row of the pool; `rows` [candidates] all of them, in the pool's order.
    """

    right: int
    rows: torch.Tensor


def distances(
    spec: FederationSpec,
    model: WholeModel,
    seen: Sequence[BatchGradient],
    pool: torch.Tensor,
    rows: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The attack: how far the features of each candidate are from those of the observed image, [candidates] for every gradient.

    Both are standardised map by map: distances of raw features find far fewer with an estimated extractor.

    Args:
        spec: of the federation.
        model: the classifier behind the attacker's extractor.
        seen: gradients of single images.
        pool: [P, C, H, W] in [0, 1].
        rows: the candidates of every gradient, as rows of the pool.
    """
    with torch.no_grad():
        features = torch.cat([linear_inputs(model, block) for block in pool.split(_ROWS_AT_ONCE)])
    features = standardised(features, spec)
    wanted = standardised(torch.stack([revealed_features(model, one) for one in seen]), spec)
    return [(features[some] - one).square().sum(1) for one, some in zip(wanted, rows, strict=True)]


def ranks(found: Sequence[torch.Tensor], line_ups: Sequence[LineUp]) -> Values:
    """The rank of the right candidate, [N], 1 the best; candidates at the same distance count as nearer."""
    places = [
        int((some <= some[one.rows == one.right] * (1 + _SURE)).sum())
        for some, one in zip(found, line_ups, strict=True)
    ]
    return np.array(places, dtype=np.float64)


def _line_ups(pool: ImageSet, wanted: torch.Tensor, streams: Streams) -> list[LineUp]:
    """For each row of the pool up to 200 rows of its class with it among them; none where a class has fewer than 20."""
    found = []
    for row in wanted.tolist():
        same = torch.nonzero(pool.labels == pool.labels[row]).flatten()
        others = same[same != row]
        order = torch.randperm(len(others), generator=streams.generator("candidates", row))
        rows = torch.cat([others[order[: _CANDIDATES - 1]], torch.tensor([row])]).sort().values
        if len(rows) >= _FEWEST:
            found.append(LineUp(row, rows))
    return found


def _pool(case: Case) -> ImageSet:
    """The device's training images first, then those that no training has seen."""
    known = joined(case.truth.train, case.truth.held_out)
    return known if case.view.auxiliary is None else joined(known, case.view.auxiliary)


def _figure(view: View, source: Extractor, places: Values, line_ups: Sequence[LineUp], ceiling: float | None) -> Figure:
    first, floor = int((places == 1).sum()), float(np.mean([1 / len(one.rows) for one in line_ups]))
    value = proportion(first, len(places))
    sizes = sorted(len(one.rows) for one in line_ups)
    knowledge = {Knowledge.BATCH, Knowledge.BEFORE, Knowledge.CANDIDATES, *source.knowledge}
    return Figure(
        "reid",
        "Re-identification: the right image ranked first",
        f"one image's gradient among {sizes[0]} to {sizes[-1]} candidates of its class, extractor {source.value}",
        tuple(one for one in Knowledge if one in knowledge),
        value,
        floor,
        "a random candidate of the class",
        Interval(value.value - floor, value.low - floor, value.high - floor),
        len(places),
        ceiling,
        "share",
    )


def _sources(view: View) -> list[Extractor]:
    """The true extractor first: the others' ceiling."""
    if view.shares_extractor:
        return [Extractor.SENT]
    surrogate = [] if view.auxiliary is None else [Extractor.SURROGATE]
    return [Extractor.TRUE, Extractor.RANDOM, Extractor.START, *surrogate]


def _run(case: Case, effort: Effort, progress: Progress) -> Outcome:
    view, true, streams = case.view, case.model(), case.streams.at(ATTACK.name)
    assert true is not None
    pool, order = _pool(case), torch.randperm(len(case.truth.train), generator=streams.generator("images"))
    line_ups = _line_ups(pool, order[: effort.of(40, 200, 1000)], streams)
    pixels, parts = unit_pixels(pool.images), (Part.EXTRACTOR, Part.CLASSIFIER)[not view.shares_extractor :]
    seen, sources = [], _sources(view)
    total = len(line_ups) + len(sources)
    for at, one in enumerate(line_ups):
        row = slice(one.right, one.right + 1)
        seen.append(batch_gradient(view.spec, true, pixels[row], pool.labels[row], parts))
        progress(at + 1, total)
    places = {}
    for at, source in enumerate(sources):
        given = view.with_private(case.truth.before or {}) if source is Extractor.TRUE else view
        model = attacker_model(given, source, streams, effort.of(5, 20, 60))
        found = distances(view.spec, model, seen, pixels, [one.rows for one in line_ups])
        places[source] = ranks(found, line_ups)
        progress(len(line_ups) + at + 1, total)
    best = float((places[sources[0]] == 1).mean())
    figures = (
        _figure(view, source, places[source], line_ups, None if source is sources[0] else best) for source in sources
    )
    means = "; ".join(f"{source.value} {(1 / some).mean():.3f}" for source, some in places.items())
    control = Control(
        f"share ranked first with the right extractor ({len(line_ups)} images)",
        best,
        f"at least {_CONTROL_SHARE:.0%}",
        best >= _CONTROL_SHARE,
    )
    note = "Candidates are the device's training and held-out images and the auxiliary ones."
    return Outcome(
        ATTACK.name, tuple(figures), (control,), notes=(f"Mean reciprocal rank by extractor: {means}.", note)
    )


def _lacks(case: Case) -> str | None:
    missing = case.lacks(private=True, parts=frozenset({Part.CLASSIFIER})) or lacks_closed_form(case.view.spec)
    if missing:
        return missing
    if max(_pool(case).label_counts()) < _FEWEST:
        return f"no class has {_FEWEST} images to choose from: give more as --held-out or --auxiliary"
    return None


ATTACK = Attack(
    "reidentification",
    "Re-identification",
    "Can somebody with a list of images tell which of them the device trained on?",
    "closed form of the first linear layer (Geiping 2020, proposition 3.1)",
    _lacks,
    _run,
)
