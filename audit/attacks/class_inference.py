"""GAN-based class inference: what the images of a class look like that only the device has (Hitaj et al. 2017; Anti-GAN §3 and §5.1).

The received model, its last layer widened by a class "fake", is the discriminator of the attacker's GAN; the attacker has images of the
other classes alone. Published for models that are sent whole; without the extractor an estimated one stands under the classifier.

Two figures: the mean SSIM with the device's images (Anti-GAN eq. 5), which on photographs ranks a grey image above real images of the
class, and the probability of the class by judges: networks that share no weights and no start with the attacked model.

Judges of images: whether they show a class, by networks that share neither weights nor start with the model under attack.

They belong to the truth's side of an audit: they are trained on images that no attacker has.

A GAN whose discriminator starts as a classifier, its last layer widened by a class "fake" (Hitaj et al. 2017; Anti-GAN §3).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from audit.attacks.attack import Attack, Effort, Progress, counter
from audit.evidence.case import Case, Knowledge, Truth, View
from audit.evidence.device_data import joined
from audit.evidence.networks import Extractor, WholeModel, estimated_extractor, trained_alone, whole_model
from audit.measures.figures import Control, Figure, Interval, Outcome, Pictures
from audit.measures.images import png, ssim, unit_pixels
from audit.measures.statistics import Values, bootstrap
from audit.techniques.class_shares import last_layer
from audit.techniques.image_generator import ImageGenerator
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.layers.layer_randomness import lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.optimisers import adam
from fedcg.wire.parts import AuditFigure, Part

DRAWN = 200
"""Images that a GAN is asked for."""
_NOISE = 100  # Anti-GAN table 4
_BATCH = 16
_GENERATOR_LR = 1e-3
_DISCRIMINATOR_LR = (
    1e-5  # at Anti-GAN's 1e-4 the discriminator forgets the class, which it sees no image of, within 200 steps
)
_LIKELY = 0.3  # weight of the coefficients' mean square: likely images
_BETAS = (0.5, 0.999)


def widened(classifier: nn.Module, classes: int) -> nn.Module:
    """The classifier with one output more in its last linear layer, in place: the class "fake", whose logit is 0 at first."""
    name = str(last_layer(classifier, classes))
    parent, _, child = name.rpartition(".")
    state = classifier.get_submodule(name).state_dict()
    with lent_generators(0):  # values to be overwritten
        wider = nn.Linear(state["weight"].shape[1], classes + 1)
    wider.load_state_dict({key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in state.items()})
    setattr(classifier.get_submodule(parent), child, wider)
    return classifier


def generated_images(
    model: WholeModel, view: View, target: int, steps: int, streams: Streams, tick: Callable[[], None]
) -> torch.Tensor:
    """Images of the target class by a GAN whose discriminator starts as the received model.

    Each step trains the discriminator to tell the auxiliary images' classes and "fake" apart, then the generator towards the class.

    Args:
        model: the received one; changed in place.
        view: its auxiliary images are all that the attacker knows of images.
        target: the class.
        steps: of both networks.
        streams: for first weights, noise and order.
        tick: called after each step.

    Returns:
        [DRAWN, C, H, W] in [0, 1].
    """
    assert view.auxiliary is not None
    known, labels = unit_pixels(view.auxiliary.images), view.auxiliary.labels
    discriminator = replace(model, classifier=widened(model.classifier, view.spec.class_count))
    generator, stream = ImageGenerator(_NOISE, view.auxiliary, streams.generator("start")), streams.generator("steps")
    weights = [*discriminator.extractor.parameters(), *discriminator.classifier.parameters()]
    discriminating = adam(weights, _DISCRIMINATOR_LR, 0.0, _BETAS)
    drawing = adam(generator.parameters(), _GENERATOR_LR, 0.0, _BETAS)
    fakes, wanted = (torch.full((_BATCH,), label) for label in (view.spec.class_count, target))
    for _ in range(steps):
        coefficients = generator.coefficients(torch.randn(_BATCH, _NOISE, generator=stream))
        fake, rows = generator.pixels(coefficients), torch.randint(len(known), (_BATCH,), generator=stream)
        seen = discriminator.logits(torch.cat([known[rows], fake.detach()]))
        _step(discriminating, nn.functional.cross_entropy(seen, torch.cat([labels[rows], fakes])))
        loss = nn.functional.cross_entropy(discriminator.logits(fake), wanted)
        _step(drawing, loss + _LIKELY * coefficients.square().mean())
        tick()
    with torch.no_grad():
        drawn: torch.Tensor = generator(torch.randn(DRAWN, _NOISE, generator=streams.generator("images")))
    return drawn.clamp(0, 1)


def _step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def trained_judges(
    view: View, images: ImageSet, count: int, epochs: int, streams: Streams, tick: Callable[[], None]
) -> list[WholeModel]:
    """Networks of the federation's kind that were trained on these images alone, each from a random start of its own.

    Args:
        view: for the network and its training parameters; nothing of the update is used.
        images: of all classes, none of which the attacker has: what fits the attacked model alone does not fit these.
        count: of networks.
        epochs: of each.
        streams: for starts and the order of images.
        tick: called after each network.
    """
    judges = []
    for number in range(count):
        own = streams.at("judge", number)
        wanted = (Part.EXTRACTOR, Part.CLASSIFIER)
        start = {part: weights_of(build_part(view.spec, part, own.generator(part.value))) for part in wanted}
        trained = trained_alone(view, start, images, own, epochs)
        judges.append(whole_model(view.spec, trained[Part.EXTRACTOR], trained[Part.CLASSIFIER]))
        tick()
    return judges


@torch.no_grad()
def recognised(judges: Sequence[WholeModel], images: torch.Tensor, target: int) -> Values:
    """The probability of the class by the judges, their mean, for each image [N, C, H, W] in [0, 1]: [N]."""
    found: Values = (
        torch.stack([judge.logits(images).softmax(1)[:, target] for judge in judges]).mean(0).double().numpy()
    )
    return found


_NAME = "class_inference"
_SHOWN = 8


@dataclass(frozen=True)
class _Plan:
    """How much is done.

    Attributes:
        restarts: of a GAN of so many `steps`.
        images: compared by SSIM, each of the device's with each generated one.
        known: images that the attacker has; `kept`: auxiliary images that so many `judges` are trained on, for `judge_epochs`.
    """

    restarts: int
    steps: int
    surrogate_epochs: int
    control_epochs: int
    judges: int
    judge_epochs: int
    images: int
    known: int
    kept: int


_PLANS = {
    Effort.QUICK: _Plan(1, 80, 5, 12, 1, 4, 15, 400, 1500),
    Effort.DEFAULT: _Plan(1, 200, 10, 40, 2, 8, 50, 1000, 3000),
    Effort.THOROUGH: _Plan(5, 1000, 40, 80, 5, 20, 200, 4000, 5000),
}


_MEASURES: Mapping[AuditFigure, tuple[str, str]] = {
    "class_recognised": ("probability of the class that independent judges give to generated images", "share"),
    "class_ssim": ("likeness of generated images to the device's images of one class", ""),
}
"""Title and unit of each figure."""
_BEFORE = "the same attack on the aggregate before the round"
_NOISY = f"{_BEFORE}, with noise as large as the update's change"
_NOISED = 3  # aggregates with noise
_CONTROL, _UNTRAINED = "positive control", "the same attack on the untrained start"
_UNSEEN = "images of the class that nobody trained on"


def target_class(truth: Truth) -> int:
    """The class that the device trained on most: the one the attacker is made to look for."""
    return max(range(len(truth.train.classes)), key=truth.train.label_counts().__getitem__)


def without_class(view: View, target: int, most: int, stream: torch.Generator) -> tuple[View, ImageSet]:
    """The view of an attacker who has no image of the class, and of the others at most so many and half; and the images kept from it."""
    assert view.auxiliary is not None
    order = torch.randperm(len(view.auxiliary), generator=stream)
    others = order[view.auxiliary.labels[order] != target]
    known = others[: min(most, len(others) // 2)]
    kept = view.auxiliary.rows(order[~torch.isin(order, known)])
    return replace(view, auxiliary=view.auxiliary.rows(known)), kept


@dataclass(frozen=True)
class _Gans:
    """The attack with everything but the model: `view` holds the attacker's images, `tick` is called after each step."""

    view: View
    target: int
    plan: _Plan
    streams: Streams
    tick: Callable[[], None]

    def guess(self, view: View, source: Extractor) -> torch.Tensor:
        """Images from the classifier that was sent, over an extractor from `source`: [DRAWN, C, H, W] in [0, 1]."""
        classifier = view.update[Part.CLASSIFIER]
        extractor = estimated_extractor(view, source, classifier, self.streams, self.plan.surrogate_epochs)
        return self.images({Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier})

    def images(self, parts: Mapping[Part, Weights]) -> torch.Tensor:
        """Images of several GANs, equally many of each: what the first weights do to one of them shall not decide."""
        drawn = []
        for number in range(self.plan.restarts):
            model = whole_model(self.view.spec, parts[Part.EXTRACTOR], parts[Part.CLASSIFIER])
            streams = self.streams.at("restart", number)
            images = generated_images(model, self.view, self.target, self.plan.steps, streams, self.tick)
            drawn.append(images[: -(-DRAWN // self.plan.restarts)])
        return torch.stack(drawn, 1).flatten(0, 1)[:DRAWN]  # in turn, so that the first ones show every restart


def with_noise(view: View, stream: torch.Generator) -> View:
    """The view as if the aggregate before the round had been sent, with noise as large as the update's change in each of its tensors.

    A GAN follows one model's weights closely: noise alone moves its images, with a judge on CIFAR-10 by up to 0.36. What counts as
    a gain has to exceed that.
    """
    parts = {**view.start(), **view.before.parts}
    for part in view.update.keys() & parts.keys():
        changes = {name: (view.update[part][name] - value).float() for name, value in parts[part].items()}
        parts[part] = {
            name: value + (change.square().mean().sqrt() * torch.randn(change.shape, generator=stream)).to(value.dtype)
            for (name, value), change in zip(parts[part].items(), changes.values(), strict=True)
        }
    return replace(view, update=parts)


def trivial_guesses(view: View, stream: torch.Generator) -> dict[str, torch.Tensor]:
    """What an attacker would show who has not seen the device's model: [N, C, H, W] each, by what it is."""
    assert view.auxiliary is not None
    known = unit_pixels(view.auxiliary.images)
    mean = known.mean(0, keepdim=True)
    return {
        "a grey image": torch.full_like(mean, float(mean.mean())),
        "the mean image of the other classes": mean,
        "images of the other classes": known[torch.randperm(len(known), generator=stream)[:DRAWN]],
    }


def class_ssim(guesses: torch.Tensor, images: torch.Tensor) -> Values:
    """Anti-GAN eq. 5, [M]: for each of the device's images its mean SSIM with the guesses; eq. 5 is the mean of these. Windows 7x7, not 8x8."""
    pairs = ssim(guesses.repeat(len(images), 1, 1, 1), images.repeat_interleave(len(guesses), 0))
    means: Values = pairs.reshape(len(images), len(guesses)).mean(axis=1)
    return means


def _compared(
    scores: Mapping[str, Values], name: str, floors: Mapping[str, str], seed: int
) -> tuple[Interval, float, str, Interval]:
    """Value, floor, what the floor is (by the name of its scores), and gain of one of the guesses; scores are compared pairwise."""
    best = max(floors, key=lambda one: float(scores[one].mean()))
    gain = bootstrap(scores[name] - scores[best], seed)
    return bootstrap(scores[name], seed), float(scores[best].mean()), floors[best], gain


def _scored(
    measure: AuditFigure, scores: Mapping[str, Values], sources: Sequence[Extractor], trivial: Sequence[str], seed: int
) -> tuple[list[Figure], Control]:
    (title, unit), figures = _MEASURES[measure], []
    real = float(scores[_UNSEEN].mean()) if _UNSEEN in scores else 0.0
    floors = {name: name for name in trivial}
    for source in sources:
        known = {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.AUXILIARY} | source.knowledge
        compared = _compared(scores, source.value, {**floors, **_earlier(source)}, seed)
        setting, used = f"extractor: {source.value}", tuple(sorted(known, key=lambda one: one.value))
        ceiling = real if real > compared[1] else None
        figures.append(Figure(measure, title, setting, used, *compared, len(scores[source.value]), ceiling, unit))
    value, floor, floor_is, gain = _compared(scores, _CONTROL, {**floors, _UNTRAINED: _UNTRAINED}, seed)
    must = f"more than {floor_is} ({floor:.2f}), confidence bound included"
    control = f"{title}: a model that was trained long on the device's images and sent whole"
    return figures, Control(control, value.value, must, gain.low > 0, measure)


def _earlier(source: Extractor) -> dict[str, str]:
    """The attacks on the aggregate before the round, on itself and with noise: what each is as a floor, by its name."""
    noised = {f"before the round, noise {number + 1} ({source.value})": _NOISY for number in range(_NOISED)}
    return {f"before the round ({source.value})": _BEFORE, **noised}


def _sources(view: View, effort: Effort, private: Mapping[Part, Weights] | None) -> tuple[Extractor, ...]:
    if view.shares_extractor:
        return (Extractor.SENT,)
    if effort is Effort.QUICK:
        return (Extractor.SURROGATE,)
    return (Extractor.SURROGATE, Extractor.START, *(() if private is None else (Extractor.TRUE,)))


def _of_class(images: ImageSet, target: int, stream: torch.Generator) -> torch.Tensor:
    mine = unit_pixels(images.images[images.labels == target])
    return mine[torch.randperm(len(mine), generator=stream)[:DRAWN]]


def run(case: Case, effort: Effort, progress: Progress) -> Outcome:
    """Guess from the update and, for the floor, from the aggregate before the round; score both by every measure."""
    plan, streams, target = _PLANS[effort], case.streams.at(_NAME), target_class(case.truth)
    view, kept = without_class(case.view, target, plan.known, streams.generator("known"))
    earlier, train = replace(view, update={**view.start(), **view.before.parts}), case.truth.train
    noised = [with_noise(view, streams.generator("noise", number)) for number in range(_NOISED)]
    sources, trivial = _sources(view, effort, case.truth.after), trivial_guesses(view, streams.generator("trivial"))
    tick = counter(progress, plan.judges + plan.restarts * plan.steps * ((2 + _NOISED) * len(sources) + 2))
    gans, drawn = _Gans(view, target, plan, streams, tick), dict[str, torch.Tensor]()
    for source in sources:
        given = (case.truth.after or {}) if source is Extractor.TRUE else {}
        for name, one in zip([source.value, *_earlier(source)], [view, earlier, *noised], strict=True):
            drawn[name] = gans.guess(one.with_private(given), source)
    drawn[_CONTROL] = gans.images(trained_alone(view, view.start(), train, streams, plan.control_epochs))
    drawn[_UNTRAINED] = gans.images(view.start())
    images, unseen = (_of_class(one, target, streams.generator("scored")) for one in (train, case.truth.held_out))
    drawn |= trivial | ({_UNSEEN: unseen} if len(unseen) else {})
    seen = joined(kept.rows(torch.arange(min(plan.kept, len(kept)))), train)
    judges = trained_judges(view, seen, plan.judges, plan.judge_epochs, streams, tick)
    measures: Mapping[AuditFigure, Callable[[torch.Tensor], Values]] = {
        "class_recognised": lambda some: np.resize(recognised(judges, some, target), DRAWN),
        "class_ssim": lambda some: class_ssim(some[: plan.images], images[: plan.images]),
    }
    scores = {measure: {name: score(some) for name, some in drawn.items()} for measure, score in measures.items()}
    seed = streams.seed("bootstrap")
    scored = [_scored(measure, found, sources, list(trivial), seed) for measure, found in scores.items()]
    rows = tuple(
        (name, tuple(map(png, some[:_SHOWN]))) for name, some in {"the device's images": images, **drawn}.items()
    )
    label = view.spec.classes[target]
    notes = (
        f"the attacker looks for class {label} and has no image of it",
        f"judges: {len(judges)}, trained on {len(seen)} images that the attacker has not, the device's own among them",
        *(
            f"{measure} of {_UNSEEN}: {found[_UNSEEN].mean():.3f}"
            for measure, found in scores.items()
            if _UNSEEN in found
        ),
        "the intervals are over generated images (SSIM: over the device's), not over repeated attacks",
    )
    pictures = Pictures(f"class {label}: what the device has, and what was generated", rows)
    figures = tuple(figure for found, _ in scored for figure in found)
    return Outcome(_NAME, figures, tuple(control for _, control in scored), (pictures,), notes=notes)


def lacks(case: Case) -> str | None:
    """Why it can't be tried: no classifier was sent, there are no images of other classes, or its last layer is not linear."""
    missing = case.lacks(auxiliary=True, parts=frozenset({Part.CLASSIFIER}))
    if missing:
        return missing
    assert case.view.auxiliary is not None
    if (case.view.auxiliary.labels != target_class(case.truth)).sum() < 4:
        return (
            "the attacker needs images of other classes than the device's most frequent one: give more as --auxiliary"
        )
    spec = case.view.spec
    if last_layer(build_part(spec, Part.CLASSIFIER), spec.class_count) is None:
        return f"the classifier of {spec.network.split} has no last linear layer that a class could be added to"
    return None


ATTACK = Attack(
    _NAME,
    "Class inference by a GAN",
    "What do the images of a class look like that only this device has?",
    "Hitaj et al. 2017; Anti-GAN §3, eq. 5, tables 4 and 6",
    lacks,
    run,
)
