"""GAN-based class inference: the look of a class that only the device has (Hitaj et al. 2017; Anti-GAN §3 and §5.1).

The received model, with a class "fake" added to its last layer, is the discriminator of the attacker's GAN. The
attacker only has images of the other classes. Published for whole models; if the extractor is not sent, the attacker
uses an estimated one.

Two figures: the mean SSIM with the device's images (Anti-GAN eq. 5), and the probability of the class by judges. On
photographs, SSIM ranks a grey image above real images of the class. Judges are networks that share no weights and no
initial weights with the attacked model. They are part of the truth: they are trained on images that no attacker has.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.stats import t as student
from torch import nn

from audit.attacks.attack import Attack, Effort, Found, Tick, Trial, ceiling_control
from audit.evidence import Case, Extractor, Knowledge, Truth, View, WholeModel, joined, networks
from audit.measures import Chance, Control, Figure, Measure, Pictures, Values, chance_in, png, ssim, unit_pixels
from audit.techniques.class_shares import last_layer
from audit.techniques.image_decoder import ImageGenerator, descend
from fedcg.learning.image_set import ImageSet
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.optimisers import adam
from fedcg.values import Value
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
    for own in (streams.at("judge", number) for number in range(count)):
        start = {part: weights_of(build_part(view.spec, part, own.generator(part.value))) for part in networks.WHOLE}
        trained = networks.trained_alone(view, start, images, own, epochs)
        judges.append(networks.whole_model(view.spec, trained))
        tick()
    return judges


@torch.no_grad()
def recognised(judges: Sequence[WholeModel], images: torch.Tensor, target: int) -> Values:
    """Return the judges' mean probability of the class for each image [N, C, H, W] in [0, 1]: [N]."""
    likely = torch.stack([judge.logits(images).softmax(1)[:, target] for judge in judges])
    return np.asarray(likely.mean(0).double())


_SHOWN = 8
_TINY = 1e-9


class _Plan(Value):
    """The amount of work.

    Attributes:
        restarts: number of GANs of an attack and of its floor, each with `steps` steps and a surrogate from another start.
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
    Effort.QUICK: _Plan(8, 80, 5, 12, 1, 4, 15, 400, 1500),
    Effort.DEFAULT: _Plan(8, 200, 10, 40, 2, 8, 50, 1000, 3000),
    Effort.THOROUGH: _Plan(10, 1000, 40, 80, 5, 20, 200, 4000, 5000),
}


_RECOGNISED = Measure("class_recognised", "class probability of generated images, by independent judges", "share")
_SSIM = Measure("class_ssim", "likeness of generated images to the device's images of one class")
_WORTH = {_RECOGNISED: 0.1, _SSIM: 0.05}  # a smaller gain is no leak: a better trained model alone gives it
_BEFORE = "the same attack on the aggregate before the round, with noise as large as the update's change"
_CONTROL_GANS, _CONTROL_CHANCE = 5, 0.01
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


def chance_of_gain(values: Values, floors: Values, worth: float, *, share_noise: bool = False) -> Chance:
    """Return the exact probability that GANs drawn at random from both groups [N] and [M] gain as much over the others, if the true gain is `worth` or less.

    With `share_noise`, values follow one draw of the noise that each floor has alone: they are not independent. Then the
    probability is at least Student's for the mean of the values as a single new draw beside the floors.
    """
    pooled = np.concatenate([values - worth, floors])
    chosen = np.array(list(itertools.combinations(range(len(pooled)), len(values))))
    sums = pooled[chosen].sum(1)
    likely = [chance_in(float(sums[0]), sums[1:])]
    if share_noise:
        deviation = max(float(floors.std(ddof=1)), _TINY) * (1 + 1 / len(floors)) ** 0.5
        gain = (values.mean() - floors.mean() - worth) / deviation
        likely.append(float(student(len(floors) - 1).sf(gain)))
    return Chance(float(np.max(likely)), 1 / len(chosen))


def with_noise(view: View, stream: torch.Generator) -> View:
    """Return the view as if the aggregate before the round had been sent, with noise as large as the update's change in each tensor.

    A GAN follows one model's weights closely: noise alone changes its images, by up to 0.36 for a judge on CIFAR-10. A
    gain must exceed that.
    """
    parts = {**view.start(), **view.before.parts}
    for part in sorted(view.update.keys() & parts.keys()):  # the order of a set differs between processes
        noised = {}
        for name, value in parts[part].items():
            size = (view.update[part][name] - value).float().square().mean().sqrt()
            noised[name] = value + (size * torch.randn(value.shape, generator=stream)).to(value.dtype)
            if name.endswith("running_var"):
                noised[name] = noised[name].abs()
        parts[part] = noised
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
    """Yield a figure for each extractor, and their control: scores [GANs] are compared with those of the floors."""
    real = float(scores[_UNSEEN].mean()) if _UNSEEN in scores else 0.0

    def beside(name: str, setting: str, used: frozenset[Knowledge], earlier: str, floor_is: str) -> Figure:
        """Return a figure of the GANs of one name over the best of the trivial guesses and the GANs of `earlier`."""
        floors = {one: scores[one] for one in (*trivial, earlier)}
        values = scores[name]
        pairs = [(floor_is if one == earlier else one, np.resize(some, len(values))) for one, some in floors.items()]
        worth, noised = _WORTH[measure], {earlier} - {_UNTRAINED}
        tested = [chance_of_gain(values, some, worth, share_noise=one in noised) for one, some in floors.items()]
        chance = Chance(*np.max(tested, axis=0).tolist())
        found = measure.paired(setting, used, values, pairs, seed, chance=chance)
        return replace(found, ceiling=real if real > found.floor else None)

    for source in sources:
        used = frozenset({Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.AUXILIARY}) | source.knowledge
        yield beside(source.value, f"extractor: {source.value}", used, _earlier(source), _BEFORE)
    control = beside(_CONTROL, "", frozenset(), _UNTRAINED, _UNTRAINED)
    must = f"over {control.floor_is} ({control.floor:.2f}) by more than {_WORTH[measure]} (p below 1 %)"
    title = f"{measure.title}: a model trained for long on the device's images and sent whole"
    passed = control.p is not None and control.p < _CONTROL_CHANCE
    yield Control(title, control.value.value, must, passed, measure.name)


def _earlier(source: Extractor) -> str:
    """Return the name of the attacks on the aggregate before the round, with noise."""
    return f"before the round, with noise ({source.value})"


def _of_class(images: ImageSet, target: int, stream: torch.Generator) -> torch.Tensor:
    mine = unit_pixels(images.images[images.labels == target])
    return mine[torch.randperm(len(mine), generator=stream)[:DRAWN]]


def _drawn(
    trial: Trial, view: View, target: int, plan: _Plan, sources: Sequence[Extractor], tick: Tick
) -> dict[str, list[torch.Tensor]]:
    """Generate images with each GAN from the update and, as floors, from the aggregate before the round; also for controls."""
    streams, truth, drawn, known = trial.streams, trial.truth, dict[str, list[torch.Tensor]](), view.auxiliary
    assert known is not None

    def images(model: WholeModel, own: Streams) -> torch.Tensor:
        gan = ClassGan(known, target, own)
        gan.train(model, plan.steps, tick)
        return gan.images(own.generator("images"))[: -(-DRAWN // plan.restarts)]

    for source in sources:
        given = view.with_private((truth.after or {}) if source is Extractor.TRUE else {})
        noised = [with_noise(given, streams.generator("noise", number)) for number in range(plan.restarts)]
        for name, views in ((source.value, [given] * len(noised)), (_earlier(source), noised)):
            runs = [(one, streams.at(name, number)) for number, one in enumerate(views)]
            surrogates = (networks.assembled(one, source, own, plan.surrogate_epochs) for one, own in runs)
            drawn[name] = [images(model, own) for model, (_, own) in zip(surrogates, runs, strict=True)]
    trained = networks.trained_alone(view, view.start(), truth.train, streams, plan.control_epochs)
    for name, parts in ((_CONTROL, trained), (_UNTRAINED, view.start())):
        models = [networks.whole_model(view.spec, parts) for _ in range(_CONTROL_GANS)]
        drawn[name] = [images(model, streams.at(name, number)) for number, model in enumerate(models)]
    return drawn


def _carry_out(trial: Trial) -> Iterator[Found]:
    plan, streams, target, train = _PLANS[trial.effort], trial.streams, target_class(trial.truth), trial.truth.train
    view, kept = without_class(trial.view, target, plan.known, streams.generator("known"))
    given = () if trial.truth.after is None else (Extractor.TRUE,)
    more = given if trial.effort is Effort.QUICK else (Extractor.START, *given)
    sources = view.extractors(Extractor.SURROGATE, *more)
    tick = trial.steps(plan.judges + plan.steps * 2 * (plan.restarts * len(sources) + _CONTROL_GANS))
    drawn = _drawn(trial, view, target, plan, sources, tick)
    trivial = trivial_guesses(view, streams.generator("trivial"))
    drawn |= {name: list(some[torch.arange(DRAWN) % len(some)].chunk(plan.restarts)) for name, some in trivial.items()}
    unseen = _of_class(trial.truth.held_out, target, streams.generator("scored"))
    drawn |= {_UNSEEN: [unseen]} if len(unseen) else {}
    images = _of_class(train, target, streams.generator("scored"))
    seen = joined(kept.rows(torch.arange(min(plan.kept, len(kept)))), train)
    judges = trained_judges(view, seen, plan.judges, plan.judge_epochs, streams, tick)
    label = view.spec.classes[target]
    yield f"the attacker targets class {label} and has no image of it"
    yield f"judges: {len(judges)}, trained on {len(seen)} images that the attacker does not have, including the device's own"
    measures: Mapping[Measure, Callable[[torch.Tensor], float]] = {
        _RECOGNISED: lambda some: float(recognised(judges, some, target).mean()),
        _SSIM: lambda some: float(class_ssim(some[:_SHOWN], images[: plan.images]).mean()),
    }
    for measure, score in measures.items():
        scores = {name: np.array([score(one) for one in some]) for name, some in drawn.items()}
        figures = list(_scored(measure, scores, sources, list(trivial), streams.seed("bootstrap")))
        yield from figures
        true = [one for one in figures if isinstance(one, Figure) and not one.is_possible and one.p is not None]
        value = max((one.value.value for one in true), default=0.0)
        yield from ceiling_control(trial.case, measure.name, value, [one.p or 0.0 for one in true])
        if _UNSEEN in scores:
            yield f"{measure.name} of {_UNSEEN}: {scores[_UNSEEN].mean():.3f}"
        yield f"{measure.name}: a gain of {_WORTH[measure]} or less is no leak; the chance is that of a larger one"
    yield "the intervals cover repeated GANs"
    shown = {"the device's images": images} | {
        name: torch.stack([one[0] for one in some]) for name, some in drawn.items()
    }
    rows = tuple((name, tuple(map(png, some[:_SHOWN]))) for name, some in shown.items())
    yield Pictures(f"class {label}: the device's images, and generated images", rows)


def _lacks(case: Case) -> str | None:
    assert case.view.auxiliary is not None
    if (case.view.auxiliary.labels != target_class(case.truth)).sum() < 4:
        return "the attacker needs images of other classes than the device's most frequent: give more with --auxiliary"
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
