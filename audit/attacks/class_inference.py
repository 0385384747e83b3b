"""GAN-based class inference: what the images of a class look like that only the device has (Hitaj et al. 2017; Anti-GAN §3 and §5.1).

The received model, its last layer widened by a class "fake", is the discriminator of the attacker's GAN; the attacker has images of the
other classes alone. Published for models that are sent whole; without the extractor an estimated one stands under the classifier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from audit.attacks.attack import Attack, Effort, Progress, counter
from audit.evidence.case import Case, Knowledge, Truth, View
from audit.evidence.networks import Extractor, WholeModel, estimated_extractor, trained_alone, whole_model
from audit.measures.figures import Control, Figure, Outcome, Pictures
from audit.measures.images import png, ssim, unit_pixels
from audit.measures.statistics import Values, bootstrap
from audit.techniques.image_generator import ImageGenerator
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.layer_randomness import lent_generators
from fedcg.learning.seeds import Streams
from fedcg.learning.training.training_loop import adam
from fedcg.wire.parts import Part

_NAME = "class_inference"
_NOISE = 100  # Anti-GAN table 4
_BATCH = 16
_GENERATOR_LR = 1e-3
_DISCRIMINATOR_LR = (
    1e-5  # at Anti-GAN's 1e-4 the discriminator forgets the class, which it sees no image of, within 200 steps
)
_LIKELY = 0.3  # weight of the coefficients' mean square: likely images
_BETAS = (0.5, 0.999)
_SHOWN = 8


@dataclass(frozen=True)
class _Plan:
    """How much is done: `restarts` of a GAN of so many `steps`, epochs of a surrogate and of the control's model, `images` compared, `known` to the attacker."""

    restarts: int
    steps: int
    surrogate_epochs: int
    control_epochs: int
    images: int
    known: int

    @staticmethod
    def of(effort: Effort) -> _Plan:
        return _Plan(
            effort.of(1, 3, 5),
            effort.of(120, 300, 1000),
            effort.of(5, 20, 40),
            effort.of(20, 40, 80),
            effort.of(15, 50, 200),
            effort.of(400, 1000, 4000),
        )


def target_class(truth: Truth) -> int:
    """The class that the device trained on most: the one the attacker is made to look for."""
    return max(range(len(truth.train.classes)), key=truth.train.label_counts().__getitem__)


def without_class(view: View, target: int, most: int, stream: torch.Generator) -> View:
    """The view of an attacker who has no image of the class, and at most so many of the others."""
    assert view.auxiliary is not None
    order = torch.randperm(len(view.auxiliary), generator=stream)
    return replace(view, auxiliary=view.auxiliary.rows(order[view.auxiliary.labels[order] != target][:most]))


def _last_layer(classifier: nn.Module) -> tuple[str, nn.Linear] | None:
    layers = [(name, one) for name, one in classifier.named_modules() if isinstance(one, nn.Linear)]
    return layers[-1] if layers else None


def widened(classifier: nn.Module) -> nn.Module:
    """The classifier with one output more in its last linear layer, in place: the class "fake", whose logit is 0 at first."""
    found = _last_layer(classifier)
    assert found is not None
    name, last = found
    with lent_generators(0):  # values to be overwritten
        wider = nn.Linear(last.in_features, last.out_features + 1, bias=last.bias is not None)
    state = {key: torch.cat([value, torch.zeros_like(value[:1])]) for key, value in last.state_dict().items()}
    wider.load_state_dict(state)
    parent, _, child = name.rpartition(".")
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
        [200, C, H, W] in [0, 1].
    """
    assert view.auxiliary is not None
    known, labels = unit_pixels(view.auxiliary.images), view.auxiliary.labels
    judge = replace(model, classifier=widened(model.classifier))
    generator, stream = ImageGenerator(_NOISE, view.auxiliary, streams.generator("start")), streams.generator("steps")
    judging = adam([*judge.extractor.parameters(), *judge.classifier.parameters()], _DISCRIMINATOR_LR, 0.0, _BETAS)
    drawing = adam(generator.parameters(), _GENERATOR_LR, 0.0, _BETAS)
    fakes, wanted = (torch.full((_BATCH,), label) for label in (view.spec.class_count, target))
    for _ in range(steps):
        coefficients = generator.coefficients(torch.randn(_BATCH, _NOISE, generator=stream))
        fake, rows = generator.pixels(coefficients), torch.randint(len(known), (_BATCH,), generator=stream)
        seen = judge.logits(torch.cat([known[rows], fake.detach()]))
        _step(judging, nn.functional.cross_entropy(seen, torch.cat([labels[rows], fakes])))
        loss = nn.functional.cross_entropy(judge.logits(fake), wanted)
        _step(drawing, loss + _LIKELY * coefficients.square().mean())
        tick()
    with torch.no_grad():
        drawn: torch.Tensor = generator(torch.randn(200, _NOISE, generator=streams.generator("images")))
    return drawn.clamp(0, 1)


def _step(optimiser: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()


def guess(
    view: View, source: Extractor, target: int, plan: _Plan, streams: Streams, tick: Callable[[], None]
) -> torch.Tensor:
    """The attack on the classifier that was sent, over an extractor from `source`: [about plan.images, C, H, W] in [0, 1]."""
    classifier = view.update[Part.CLASSIFIER]
    extractor = estimated_extractor(view, source, classifier, streams, plan.surrogate_epochs)
    return _restarted({Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier}, view, target, plan, streams, tick)


def _restarted(
    parts: Mapping[Part, Weights], view: View, target: int, plan: _Plan, streams: Streams, tick: Callable[[], None]
) -> torch.Tensor:
    """Images of several GANs, equally many of each: what the first weights do to one of them shall not decide."""
    drawn = []
    for number in range(plan.restarts):
        model = whole_model(view.spec, parts[Part.EXTRACTOR], parts[Part.CLASSIFIER])
        images = generated_images(model, view, target, plan.steps, streams.at("restart", number), tick)
        drawn.append(images[: -(-plan.images // plan.restarts)])
    return torch.stack(drawn, 1).flatten(0, 1)  # in turn, so that the first ones show every restart


def trivial_guesses(view: View, count: int, stream: torch.Generator) -> dict[str, torch.Tensor]:
    """What an attacker would show who has not seen the device's model: [N, C, H, W] each, by what it is."""
    assert view.auxiliary is not None
    known = unit_pixels(view.auxiliary.images)
    mean = known.mean(0, keepdim=True)
    return {
        "a grey image": torch.full_like(mean, float(mean.mean())),
        "the mean image of the other classes": mean,
        "images of the other classes": known[torch.randperm(len(known), generator=stream)[:count]],
    }


def class_ssim(guesses: torch.Tensor, images: torch.Tensor) -> Values:
    """Anti-GAN eq. 5, [M]: for each of the device's images its mean SSIM with the guesses; eq. 5 is the mean of these. Windows 7x7, not 8x8."""
    pairs = ssim(guesses.repeat(len(images), 1, 1, 1), images.repeat_interleave(len(guesses), 0))
    means: Values = pairs.reshape(len(images), len(guesses)).mean(axis=1)
    return means


def _figure(source: Extractor, scores: Mapping[str, Values], value: Values, ceiling: float | None, seed: int) -> Figure:
    best = max(scores, key=lambda name: float(scores[name].mean()))
    return Figure(
        name="class_ssim",
        title="likeness of generated images to the device's images of one class",
        setting=f"extractor: {source.value}",
        knowledge=tuple(
            sorted(
                {Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.AUXILIARY} | source.knowledge, key=lambda one: one.value
            )
        ),
        value=bootstrap(value, seed),
        floor=float(scores[best].mean()),
        floor_is=best,
        gain=bootstrap(value - scores[best], seed),
        samples=len(value),
        ceiling=ceiling,
    )


def _control(guesses: torch.Tensor, images: torch.Tensor, floor: Values, seed: int) -> Control:
    value = class_ssim(guesses, images)
    return Control(
        "a model that was trained long on the device's images and sent whole",
        float(value.mean()),
        f"more than the best trivial guess ({floor.mean():.2f}), confidence bound included",
        bootstrap(value - floor, seed).low > 0,
    )


def _sources(view: View, effort: Effort) -> tuple[Extractor, ...]:
    if view.shares_extractor:
        return (Extractor.SENT,)
    return (Extractor.SURROGATE,) if effort is Effort.QUICK else (Extractor.SURROGATE, Extractor.START)


def run(case: Case, effort: Effort, progress: Progress) -> Outcome:
    """Guess from the update and, for the floor, from the aggregate before the round; score both on the device's images."""
    plan, streams, target = _Plan.of(effort), case.streams.at(_NAME), target_class(case.truth)
    view = without_class(case.view, target, plan.known, streams.generator("known"))
    earlier = replace(view, update={**view.start(), **view.before.parts})
    mine = unit_pixels(case.truth.train.images[case.truth.train.labels == target])
    images = mine[torch.randperm(len(mine), generator=streams.generator("scored"))[: plan.images]]
    trivial = trivial_guesses(view, plan.images, streams.generator("trivial"))
    floors = {name: class_ssim(one, images) for name, one in trivial.items()}
    sources, seed = _sources(view, effort), streams.seed("bootstrap")
    private = None if view.shares_extractor or effort is Effort.QUICK else case.truth.after
    tick = counter(progress, plan.restarts * plan.steps * (2 * len(sources) + (private is not None) + 1))
    shown, figures, ceiling = {"the device's images": images}, [], None
    if private is not None:
        best = guess(view.with_private(private), Extractor.TRUE, target, plan, streams, tick)
        shown["ceiling: extractor true"], ceiling = best, float(class_ssim(best, images).mean())
    for source in sources:
        found, before = (guess(one, source, target, plan, streams, tick) for one in (view, earlier))
        scores = {**floors, "the same attack on the aggregate before the round": class_ssim(before, images)}
        figures.append(_figure(source, scores, class_ssim(found, images), ceiling, seed))
        shown |= {f"extractor {source.value}": found, f"the same before the round ({source.value})": before}
    best_floor = max(floors.values(), key=lambda one: float(one.mean()))
    alone = trained_alone(view, view.start(), case.truth.train, streams, plan.control_epochs)
    shown["positive control"] = _restarted(alone, view, target, plan, streams, tick)
    control = _control(shown["positive control"], images, best_floor, seed)
    rows = tuple((name, tuple(map(png, some[:_SHOWN]))) for name, some in (shown | trivial).items())
    pictures = Pictures(f"class {view.spec.classes[target]}: what the device has, and what was generated", rows)
    notes = _notes(case, target, images, float(best_floor.mean()))
    return Outcome(_NAME, tuple(figures), (control,), (pictures,), notes=notes)


def _notes(case: Case, target: int, images: torch.Tensor, floor: float) -> tuple[str, ...]:
    """What to know of the metric: how like each other real images of the class are."""
    unseen = unit_pixels(case.truth.held_out.images[case.truth.held_out.labels == target])[: len(images)]
    notes = [
        f"the attacker looks for class {case.view.spec.classes[target]} and has no image of it",
        "the interval is over the device's images, not over repeated attacks",
        f"without the aggregate before the round the best trivial guess scores {floor:.3f}",
    ]
    if len(unseen):
        real = float(class_ssim(unseen, images).mean())
        weak = ": the metric can't show a success on these images" if real <= floor else ""
        notes.append(f"real images of the class that were not trained on score {real:.3f}{weak}")
    return tuple(notes)


def lacks(case: Case) -> str | None:
    """Why it can't be tried: no classifier was sent, there are no images of other classes, or its last layer is not linear."""
    missing = case.lacks(auxiliary=True, parts=frozenset({Part.CLASSIFIER}))
    if missing:
        return missing
    others = case.view.auxiliary is not None and (case.view.auxiliary.labels != target_class(case.truth)).sum() >= 2
    if not others:
        return (
            "the attacker needs images of other classes than the device's most frequent one: give more as --auxiliary"
        )
    last = _last_layer(load_part(case.view.spec, Part.CLASSIFIER, case.view.update[Part.CLASSIFIER]))
    if last is None or last[1].out_features != case.view.spec.class_count:
        return (
            f"the classifier of {case.view.spec.network.split} has no last linear layer that a class could be added to"
        )
    return None


ATTACK = Attack(
    _NAME,
    "Class inference by a GAN",
    "What do the images of a class look like that only this device has?",
    "Hitaj et al. 2017; Anti-GAN §3, eq. 5, tables 4 and 6",
    lacks,
    run,
)
