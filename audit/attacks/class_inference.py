"""GAN-based class inference: the look of a class that only the device has (Hitaj et al. 2017; Anti-GAN §3 and §5.1).

The received model, with a class "fake" added to its last layer, is the discriminator of the attacker's GAN. The
attacker only has images of the other classes. Published for whole models; if the extractor is not sent, the attacker
uses an estimated one.

Two figures: the mean SSIM with the device's images (Anti-GAN eq. 5), and the probability of the class by judges. On
photographs, SSIM ranks a grey image above real images of the class. Judges are networks that share no weights and no
initial weights with the attacked model. They are part of the truth: they are trained on images that no attacker has.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn

from audit.attacks.attack import Attack, Effort, Found, Tick, Trial
from audit.evidence import Case, Extractor, Knowledge, Truth, View, WholeModel, joined, networks
from audit.measures import Control, Figure, Measure, Pictures, Values, png, ssim, unit_pixels
from audit.techniques.class_shares import last_layer
from audit.techniques.image_decoder import ImageGenerator, descend
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.optimisers import adam
from fedcg.wire.parts import Part

DRAWN = 200
"""Number of images to generate."""
_NOISE = 100  # Anti-GAN table 4
_BATCH = 16
_GENERATOR_LR = 1e-3
# At Anti-GAN's 1e-4 the discriminator forgets the class within 200 steps, since it sees no images of it.
_DISCRIMINATOR_LR = 1e-5
_LIKELY = 0.3  # weight of the coefficients' mean square: likely images
_BETAS = (0.5, 0.999)


def widened(classifier: nn.Module, classes: int) -> nn.Module:
    """Add an output to the classifier's last linear layer, in place: the class "fake", whose logit starts at 0."""
    name = str(last_layer(classifier, classes))
    parent, _, child = name.rpartition(".")
    state = classifier.get_submodule(name).state_dict()
    with lent_generators(0):  # values to be overwritten
        wider = nn.Linear(state["weight"].shape[1], classes + 1)
    wider.load_state_dict({key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in state.items()})
    setattr(classifier.get_submodule(parent), child, wider)
    return classifier


class ClassGan:
    """An attacker's GAN for one class. Its generator lasts; its discriminator is the model of each training.

    Args:
        known: the attacker's only images, of other classes.
        target: the class.
        streams: for first weights, noise and order.
    """

    def __init__(self, known: ImageSet, target: int, streams: Streams) -> None:
        self._known, self._target, self._stream = known, target, streams.generator("steps")
        self._generator = ImageGenerator(_NOISE, known, streams.generator("start"))
        self._drawing = adam(self._generator.parameters(), _GENERATOR_LR, 0.0, _BETAS)

    def train(self, model: WholeModel, steps: int, tick: Tick = lambda: None) -> None:
        """Train with a received model, which is changed in place.

        Each step trains the discriminator to separate the known images' classes and "fake", then the generator towards
        the class. `tick` is called after each step.
        """
        known, labels, classes = unit_pixels(self._known.images), self._known.labels, len(self._known.classes)
        discriminator = replace(model, classifier=widened(model.classifier, classes))
        weights = [*discriminator.extractor.parameters(), *discriminator.classifier.parameters()]
        discriminating = adam(weights, _DISCRIMINATOR_LR, 0.0, _BETAS)
        fakes, wanted = (torch.full((_BATCH,), label) for label in (classes, self._target))
        for _ in range(steps):
            coefficients = self._generator.coefficients(torch.randn(_BATCH, _NOISE, generator=self._stream))
            fake = self._generator.pixels(coefficients)
            rows = torch.randint(len(known), (_BATCH,), generator=self._stream)
            seen = discriminator.logits(torch.cat([known[rows], fake.detach()]))
            descend(discriminating, nn.functional.cross_entropy(seen, torch.cat([labels[rows], fakes])))
            loss = nn.functional.cross_entropy(discriminator.logits(fake), wanted)
            descend(self._drawing, loss + _LIKELY * coefficients.square().mean())
            tick()

    @torch.no_grad()
    def images(self, stream: torch.Generator) -> torch.Tensor:
        """Generate images of the class: [DRAWN, C, H, W] in [0, 1]."""
        drawn: torch.Tensor = self._generator(torch.randn(DRAWN, _NOISE, generator=stream))
        return drawn.clamp(0, 1)


def generated_images(
    model: WholeModel, view: View, target: int, steps: int, streams: Streams, tick: Tick
) -> torch.Tensor:
    """Generate [DRAWN, C, H, W] images in [0, 1] with a new `ClassGan` from the view's auxiliary images; `model` is changed in place."""
    assert view.auxiliary is not None
    gan = ClassGan(view.auxiliary, target, streams)
    gan.train(model, steps, tick)
    return gan.images(streams.generator("images"))


def trained_judges(
    view: View, images: ImageSet, count: int, epochs: int, streams: Streams, tick: Tick
) -> list[WholeModel]:
    """Train networks of the federation's kind on these images only, each from its own random start.

    Args:
        view: for the network and its training parameters; the update is not used.
        images: of all classes, none known to the attacker, so that images that only fit the attacked model score low.
        count: number of networks.
        epochs: for each network.
        streams: for starts and the order of images.
        tick: called after each network.
    """
    judges = []
    for number in range(count):
        own = streams.at("judge", number)
        wanted = (Part.EXTRACTOR, Part.CLASSIFIER)
        start = {part: weights_of(build_part(view.spec, part, own.generator(part.value))) for part in wanted}
        trained = networks.trained_alone(view, start, images, own, epochs)
        judges.append(networks.whole_model(view.spec, trained[Part.EXTRACTOR], trained[Part.CLASSIFIER]))
        tick()
    return judges


@torch.no_grad()
def recognised(judges: Sequence[WholeModel], images: torch.Tensor, target: int) -> Values:
    """Return the judges' mean probability of the class for each image [N, C, H, W] in [0, 1]: [N]."""
    found: Values = (
        torch.stack([judge.logits(images).softmax(1)[:, target] for judge in judges]).mean(0).double().numpy()
    )
    return found


_SHOWN = 8


@dataclass(frozen=True)
class _Plan:
    """The amount of work.

    Attributes:
        restarts: number of GANs, each with `steps` steps.
        images: number of images to compare by SSIM, each of the device's with each generated one.
        known: number of images that the attacker has; `kept`: auxiliary images for training the `judges`, for
            `judge_epochs`.
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


_RECOGNISED = Measure(
    "class_recognised", "probability of the class for generated images, by independent judges", "share"
)
_SSIM = Measure("class_ssim", "likeness of generated images to the device's images of one class")
_BEFORE = "the same attack on the aggregate before the round"
_NOISY = f"{_BEFORE}, with noise as large as the update's change"
_NOISED = 3  # aggregates with noise
_CONTROL, _UNTRAINED = "positive control", "the same attack on the untrained start"
_UNSEEN = "images of the class that were not trained on"


def target_class(truth: Truth) -> int:
    """Return the class with the most training images of the device, which is the attacker's target."""
    return max(range(len(truth.train.classes)), key=truth.train.label_counts().__getitem__)


def without_class(view: View, target: int, most: int, stream: torch.Generator) -> tuple[View, ImageSet]:
    """Return the view of an attacker without images of the class and with at most `most` others (at most half); and the images kept back."""
    assert view.auxiliary is not None
    order = torch.randperm(len(view.auxiliary), generator=stream)
    others = order[view.auxiliary.labels[order] != target]
    known = others[: min(most, len(others) // 2)]
    kept = view.auxiliary.rows(order[~torch.isin(order, known)])
    return replace(view, auxiliary=view.auxiliary.rows(known)), kept


@dataclass(frozen=True)
class _Gans:
    """The attack without the model: `view` holds the attacker's images, `tick` is called after each step."""

    view: View
    target: int
    plan: _Plan
    streams: Streams
    tick: Tick

    def guess(self, view: View, source: Extractor) -> torch.Tensor:
        """Generate images from the sent classifier and an extractor from `source`: [DRAWN, C, H, W] in [0, 1]."""
        classifier = view.update[Part.CLASSIFIER]
        extractor = networks.estimated_extractor(view, source, classifier, self.streams, self.plan.surrogate_epochs)
        return self.images({Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier})

    def images(self, parts: Mapping[Part, Weights]) -> torch.Tensor:
        """Generate equally many images with each of several GANs, so that no single initialisation decides the result."""
        drawn = []
        for number in range(self.plan.restarts):
            model = networks.whole_model(self.view.spec, parts[Part.EXTRACTOR], parts[Part.CLASSIFIER])
            streams = self.streams.at("restart", number)
            images = generated_images(model, self.view, self.target, self.plan.steps, streams, self.tick)
            drawn.append(images[: -(-DRAWN // self.plan.restarts)])
        return torch.stack(drawn, 1).flatten(0, 1)[:DRAWN]  # interleaved, so that the first images show every restart


def with_noise(view: View, stream: torch.Generator) -> View:
    """Return the view as if the aggregate before the round had been sent, with noise as large as the update's change in each tensor.

    A GAN follows one model's weights closely: noise alone changes its images, by up to 0.36 for a judge on CIFAR-10. A
    gain must exceed that.
    """
    parts = {**view.start(), **view.before.parts}
    for part in sorted(view.update.keys() & parts.keys()):  # the order of a set differs between processes
        changes = {name: (view.update[part][name] - value).float() for name, value in parts[part].items()}
        parts[part] = {
            name: value + (change.square().mean().sqrt() * torch.randn(change.shape, generator=stream)).to(value.dtype)
            for (name, value), change in zip(parts[part].items(), changes.values(), strict=True)
        }
    return replace(view, update=parts)


def trivial_guesses(view: View, stream: torch.Generator) -> dict[str, torch.Tensor]:
    """Return the guesses of an attacker without the device's model, by name: [N, C, H, W] each."""
    assert view.auxiliary is not None
    known = unit_pixels(view.auxiliary.images)
    mean = known.mean(0, keepdim=True)
    return {
        "a grey image": torch.full_like(mean, float(mean.mean())),
        "the mean image of the other classes": mean,
        "images of the other classes": known[torch.randperm(len(known), generator=stream)[:DRAWN]],
    }


def class_ssim(guesses: torch.Tensor, images: torch.Tensor) -> Values:
    """Return the mean SSIM of each of the device's images with the guesses, [M]; Anti-GAN eq. 5 is the mean of these. Windows 7x7, not 8x8."""
    pairs = ssim(guesses.repeat(len(images), 1, 1, 1), images.repeat_interleave(len(guesses), 0))
    means: Values = pairs.reshape(len(images), len(guesses)).mean(axis=1)
    return means


def _scored(
    measure: Measure, scores: Mapping[str, Values], sources: Sequence[Extractor], trivial: Sequence[str], seed: int
) -> Iterator[Figure | Control]:
    """Yield a figure for each extractor, and their control: scores are paired with those of the floors."""
    real = float(scores[_UNSEEN].mean()) if _UNSEEN in scores else 0.0

    def beside(name: str, setting: str, used: frozenset[Knowledge], floors: Mapping[str, str]) -> Figure:
        """Return a figure of the guesses of one name; the floors are given as names with descriptions."""
        found = measure.paired(setting, used, scores[name], [(one, scores[one]) for one in floors], seed)
        return replace(found, floor_is=floors[found.floor_is], ceiling=real if real > found.floor else None)

    floors = {name: name for name in trivial}
    for source in sources:
        used = frozenset({Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.AUXILIARY}) | source.knowledge
        yield beside(source.value, f"extractor: {source.value}", used, {**floors, **_earlier(source)})
    control = beside(_CONTROL, "", frozenset(), {**floors, _UNTRAINED: _UNTRAINED})
    must = f"above {control.floor_is} ({control.floor:.2f}), including the confidence bound"
    title = f"{measure.title}: a model trained for long on the device's images and sent whole"
    yield Control(title, control.value.value, must, control.gain.low > 0, measure.name)


def _earlier(source: Extractor) -> dict[str, str]:
    """Return the attacks on the aggregate before the round, without and with noise: their descriptions as floors, by name."""
    noised = {f"before the round, noise {number + 1} ({source.value})": _NOISY for number in range(_NOISED)}
    return {f"before the round ({source.value})": _BEFORE, **noised}


def _of_class(images: ImageSet, target: int, stream: torch.Generator) -> torch.Tensor:
    mine = unit_pixels(images.images[images.labels == target])
    return mine[torch.randperm(len(mine), generator=stream)[:DRAWN]]


def _drawn(
    trial: Trial, gans: _Gans, sources: Sequence[Extractor], trivial: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Generate images from the update and, as floors, from the aggregate before the round; also for controls and trivial guesses."""
    view, streams, truth, drawn = gans.view, trial.streams, trial.truth, dict[str, torch.Tensor]()
    earlier = replace(view, update={**view.start(), **view.before.parts})
    noised = [with_noise(view, streams.generator("noise", number)) for number in range(_NOISED)]
    for source in sources:
        given = (truth.after or {}) if source is Extractor.TRUE else {}
        for name, one in zip([source.value, *_earlier(source)], [view, earlier, *noised], strict=True):
            drawn[name] = gans.guess(one.with_private(given), source)
    drawn[_CONTROL] = gans.images(
        networks.trained_alone(view, view.start(), truth.train, streams, gans.plan.control_epochs)
    )
    drawn[_UNTRAINED] = gans.images(view.start())
    unseen = _of_class(truth.held_out, gans.target, streams.generator("scored"))
    return drawn | trivial | ({_UNSEEN: unseen} if len(unseen) else {})


def _carry_out(trial: Trial) -> Iterator[Found]:
    plan, streams, target, train = _PLANS[trial.effort], trial.streams, target_class(trial.truth), trial.truth.train
    view, kept = without_class(trial.view, target, plan.known, streams.generator("known"))
    if trial.effort is Effort.QUICK:
        sources = view.extractors(Extractor.SURROGATE)
    else:
        given = () if trial.truth.after is None else (Extractor.TRUE,)
        sources = view.extractors(Extractor.SURROGATE, Extractor.START, *given)
    tick = trial.steps(plan.judges + plan.restarts * plan.steps * ((2 + _NOISED) * len(sources) + 2))
    trivial = trivial_guesses(view, streams.generator("trivial"))
    drawn = _drawn(trial, _Gans(view, target, plan, streams, tick), sources, trivial)
    images = _of_class(train, target, streams.generator("scored"))
    seen = joined(kept.rows(torch.arange(min(plan.kept, len(kept)))), train)
    judges = trained_judges(view, seen, plan.judges, plan.judge_epochs, streams, tick)
    label = view.spec.classes[target]
    yield f"the attacker targets class {label} and has no image of it"
    yield f"judges: {len(judges)}, trained on {len(seen)} images that the attacker does not have, including the device's own"
    measures: Mapping[Measure, Callable[[torch.Tensor], Values]] = {
        _RECOGNISED: lambda some: np.resize(recognised(judges, some, target), DRAWN),
        _SSIM: lambda some: class_ssim(some[: plan.images], images[: plan.images]),
    }
    for measure, score in measures.items():
        scores = {name: score(some) for name, some in drawn.items()}
        yield from _scored(measure, scores, sources, list(trivial), streams.seed("bootstrap"))
        if _UNSEEN in scores:
            yield f"{measure.name} of {_UNSEEN}: {scores[_UNSEEN].mean():.3f}"
    yield "the intervals cover generated images (for SSIM: the device's images), not repeated attacks"
    shown = {"the device's images": images, **drawn}
    rows = tuple((name, tuple(map(png, some[:_SHOWN]))) for name, some in shown.items())
    yield Pictures(f"class {label}: the device's images, and generated images", rows)


def _lacks(case: Case) -> str | None:
    assert case.view.auxiliary is not None
    if (case.view.auxiliary.labels != target_class(case.truth)).sum() < 4:
        return (
            "the attacker needs images of other classes than the device's most frequent one: give more with --auxiliary"
        )
    spec = case.view.spec
    if last_layer(build_part(spec, Part.CLASSIFIER), spec.class_count) is None:
        return f"the classifier of {spec.network.split} has no final linear layer to which a class can be added"
    return None


ATTACK = Attack(
    "class_inference",
    "Class inference by a GAN",
    "What do the images of a class look like that only this device has?",
    "Hitaj et al. 2017; Anti-GAN §3, eq. 5, tables 4 and 6",
    _carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    auxiliary=True,
    lacking=_lacks,
    least_side=7,
)
