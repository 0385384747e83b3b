"""Gradient inversion: images from the gradients of single images, of batches, and from the weight difference of a whole round.

DLG (Zhu 2019; FedCG eq. 7), iDLG (Zhao 2020), cosine with total variation (Geiping 2020), FedCG eq. 8, and matching of
features that the classifier's gradient reveals exactly. With auxiliary images, a search starts from the class's mean
image and stays in their principal components. Every guess is a function of a `View` and of observed gradients.

The rank of an observation's Jacobian at an image is the number of pixels that it can determine: a bound on every
reconstruction.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from audit import measures
from audit.attacks.attack import Attack, Effort, Found, Tick, Trial
from audit.evidence import Case, Extractor, Knowledge, View, WholeModel, networks
from audit.measures import Control, Figure, Pictures, Reconstructions, trivial_images, unit_pixels
from audit.techniques import gradients
from audit.techniques.gradients import Search, Start, search
from audit.techniques.image_decoder import PrincipalComponents
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.networks import feature_shape, load_part
from fedcg.learning.seeds import Streams
from fedcg.values import Value
from fedcg.wire.parts import Part

Parts = Mapping[Part, Weights]


# Weights of the total variation, chosen on CIFAR-10 with LeNet5: the right model, noise on the gradient, an estimated extractor.
_PRIOR, _NOISY_PRIOR, _LOOSE_PRIOR = 0.03, 0.01, 1.0
# Weights of squared coefficients: the right model, an estimated extractor. Chosen on digits, clients 2 to 4 of the demo.
_KNOWN_PRIOR, _LOOSE_KNOWN_PRIOR = 1e-5, 1e-3
_COMPONENTS = 256  # their variances fall, and with them the effect of the number
_DEVIATIONS = (0.001**0.5, 0.1**0.5)  # FedCG table 2: noise of variance 0.001 and 0.1
_CONTROL_GAIN_DB = 3.0
_SHOWN = 8
_GENERATED = 64


class Match(str, Enum):
    """The quantity to match. The values are the words of the report."""

    GRADIENT = "gradient"
    COSINE = "gradient's direction"
    STATISTICS = "gradient and generator statistics (FedCG eq. 8)"
    FEATURES = "features in closed form"
    DIRECTION = "features' direction"

    @property
    def is_of_features(self) -> bool:
        """Whether features are matched, which one search can do for many images."""
        return self in (Match.FEATURES, Match.DIRECTION)


class Setting(Value):
    """One setting of the attack.

    Attributes:
        rows: images in a batch; 0: the weight difference of the whole round, one image per class.
        deviation: standard deviation of Gaussian noise on every observed number.
    """

    extractor: Extractor
    match: Match
    how: Search
    rows: int = 1
    deviation: float = 0.0

    @property
    def words(self) -> str:
        """The setting, as words for a report; unique within a run."""
        what = {0: "weight difference of the round", 1: "single images"}.get(self.rows, f"batch of {self.rows}")
        noise = f", noise of variance {self.deviation**2:.3g}" if self.deviation else ""
        labels = ", labels searched (DLG)" if self.how.soft_labels else ""
        prior = "with" if self.how.prior else "no"
        optimiser = "Adam on signs" if self.how.signed_adam else "L-BFGS"
        return (
            f"{what}{noise}: {self.match.value}, extractor {self.extractor.value}, from {self.how.start.value}{labels}, "
            f"{prior} prior, {optimiser}"
        )

    @property
    def knowledge(self) -> frozenset[Knowledge]:
        """The attacker's knowledge."""
        seen = Knowledge.BATCH if self.rows else Knowledge.UPDATE
        generator = {Knowledge.UPDATE} if self.match is Match.STATISTICS else set()
        known = {Knowledge.AUXILIARY} if self.how.start is Start.CLASS else set()
        return frozenset({seen, Knowledge.BEFORE} | generator | known) | self.extractor.knowledge

    def searches(self, images: int) -> int:
        """Return the number of searches with this number of images."""
        return 1 if self.match.is_of_features or not self.rows else self.used(images) // self.rows

    def used(self, images: int) -> int:
        """Return how many images are attacked: all alone, or two batches."""
        wanted = images if self.rows == 1 else min(images, 2 * self.rows)
        return wanted // self.rows * self.rows

    @property
    def is_ceiling(self) -> bool:
        """Whether this is the attacker's best case: one image, no noise, the device's own extractor, and a prior."""
        return self.extractor.is_own and bool(self.how.prior) and self.rows == 1 and not self.deviation


class Result(Value):
    """The result of one setting; `diverged` is the share of its searches that diverged."""

    setting: Setting
    images: Reconstructions
    diverged: float


def settings_of(view: View, effort: Effort) -> list[Setting]:
    """Return the settings to try on a method that sends the whole model, or only the classifier."""
    steps, quick, has_known = effort.of(40, 100, 300), effort is Effort.QUICK, view.auxiliary is not None
    paper = Search(steps, Start.NOISE, restarts=effort.of(1, 2, 4), soft_labels=True)
    prior = Search(steps, Start.GREY, _PRIOR)
    known = Search(2 * steps, Start.CLASS, _KNOWN_PRIOR) if has_known else prior
    loose = replace(known, prior=_LOOSE_KNOWN_PRIOR if has_known else _LOOSE_PRIOR)
    if view.shares_extractor:
        sent = Extractor.SENT
        found = [Setting(sent, Match.GRADIENT, paper)]
        matches = (Match.GRADIENT, Match.FEATURES)
        found += [Setting(sent, match, known) for match in matches]
        if quick:
            return found
        found += [Setting(sent, match, prior) for match in matches if has_known]
        signed, noisy = Search(2 * steps, Start.GREY, _PRIOR, signed_adam=True), Search(steps, Start.GREY, _NOISY_PRIOR)
        found += [Setting(sent, Match.GRADIENT, Search(steps, Start.GREY)), Setting(sent, Match.COSINE, signed)]
        found += [Setting(sent, match, known) for match in (Match.COSINE, Match.DIRECTION)]
        found += [Setting(sent, Match.GRADIENT, how, 1, noise) for noise in _DEVIATIONS for how in (paper, noisy)]
        found += [Setting(sent, Match.GRADIENT, how, rows) for rows in (4, 16) for how in {prior: 0, known: 0}]
        return [*found, Setting(sent, Match.COSINE, loose, 0)]
    sources = view.extractors(Extractor.RANDOM, Extractor.START, Extractor.SURROGATE, Extractor.COLLUDER)
    found = [Setting(Extractor.RANDOM, Match.GRADIENT, paper)]
    features = (Match.FEATURES, Match.DIRECTION)
    if quick:
        found += [Setting(sources[-1], match, loose) for match in features]
        return [*found, Setting(Extractor.TRUE, Match.FEATURES, known)]
    if Part.GENERATOR in view.update:
        found += [Setting(Extractor.RANDOM, Match.STATISTICS, paper), Setting(sources[-1], Match.STATISTICS, loose)]
    found += [Setting(source, match, loose) for match in features for source in sources]
    found += [Setting(sources[-1], match, loose) for match in (Match.GRADIENT, Match.COSINE)]
    found += [Setting(Extractor.TRUE, match, known) for match in (*features, Match.GRADIENT, Match.COSINE)]
    found += [Setting(sources[-1], Match.GRADIENT, loose, rows) for rows in (4, 16)]
    return [*found, Setting(sources[-1], Match.COSINE, loose, 0)]


def _generated_statistics(view: View, labels: torch.Tensor, stream: torch.Generator) -> torch.Tensor:
    """Return channel statistics of the features that the client's generator makes for the batch's labels."""
    generator = load_part(view.spec, Part.GENERATOR, view.update[Part.GENERATOR]).eval()
    wanted = labels.repeat_interleave(_GENERATED)
    noise = torch.randn(len(wanted), view.spec.network.noise_dim, generator=stream)
    with torch.no_grad():
        return gradients.channel_statistics(generator(noise, wanted))


def round_difference(view: View, parts: tuple[Part, ...]) -> gradients.BatchGradient:
    """Return the round's weight difference, read as the gradient of one image per class; its length has no meaning."""
    values = []
    for part in parts:
        moved = gradients.weight_difference(view.update[part], view.before.parts[part])
        values += [moved[name] for name, _ in load_part(view.spec, part, view.update[part]).named_parameters()]
    return gradients.BatchGradient(parts, tuple(values), view.spec.class_count)


class _Attacker(Value):
    """What an attacker prepares before a search.

    Attributes:
        models: an extractor and the aggregate's classifier; several surrogates.
        space: of the auxiliary images; None without any.
    """

    view: View
    models: Sequence[WholeModel]
    space: PrincipalComponents | None

    def guess(
        self, seen: Sequence[gradients.BatchGradient], setting: Setting, stream: torch.Generator
    ) -> gradients.Found:
        """Run the attack: from an observation, or from several of one image each if features are matched, to pixels."""
        labels = torch.cat([gradients.revealed_labels(one) if setting.rows else torch.arange(one.rows) for one in seen])
        if setting.match.is_of_features:
            features = torch.stack([gradients.revealed_features(self.models[0], one) for one in seen])
            of_features = gradients.feature_distance if setting.match is Match.FEATURES else gradients.feature_angle
            objectives = [of_features(model, features) for model in self.models]
        else:
            distance = gradients.cosine_distance if setting.match is Match.COSINE else gradients.gradient_distance
            objectives = [distance(model, seen[0]) for model in self.models]
        if setting.match is Match.STATISTICS:
            wanted = _generated_statistics(self.view, labels, stream)
            pairs = zip(objectives, self.models, strict=True)
            objectives = [gradients.with_statistics(one, model, wanted) for one, model in pairs]

        def objective(pixels: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
            return torch.stack([one(pixels, given) for one in objectives]).mean()

        return search(objective, labels, _form(self.view), self.view.spec.class_count, setting.how, stream, self.space)


def _form(view: View) -> tuple[int, int, int]:
    return view.spec.image.tensor_shape


def _of_batches(
    attacker: _Attacker, true: Parts, setting: Setting, images: ImageSet, streams: Streams, tick: Tick
) -> Result:
    """Attack single images or batches; each batch's guesses are put into the order that fits the truth best."""
    view, pixels, guesses, diverged = attacker.view, unit_pixels(images.images), [], []
    seen, stream = _gradients_of(view, true, images, setting.rows), streams.generator("gradient noise")
    if setting.deviation:
        seen = [gradients.with_noise(one, setting.deviation, stream) for one in seen]
    together = len(seen) if setting.match.is_of_features else 1
    for first in range(0, len(seen), together):
        some = seen[first : first + together]
        guess = attacker.guess(some, setting, streams.generator("search", first))
        truth = pixels[first * setting.rows : (first + len(some)) * setting.rows]
        guesses.append(guess.pixels if setting.rows == 1 else in_best_order(guess.pixels, truth))
        diverged.append(guess.diverged)
        tick()
    trivial = trivial_images(view, images, streams.generator("floor"))
    floors = {name: (guess, pixels) for name, guess in trivial}
    return Result(setting, Reconstructions(torch.cat(guesses), pixels, floors), float(np.mean(diverged)))


def _gradients_of(view: View, true: Parts, images: ImageSet, rows: int = 1) -> list[gradients.BatchGradient]:
    """Return the gradients of images, in batches of `rows`, as the device would send them."""
    batches = zip(unit_pixels(images.images).split(rows), images.labels.split(rows), strict=True)
    return [gradients.batch_gradient(view.spec, true, *batch, _sent_parts(view)) for batch in batches]


def _sent_parts(view: View) -> tuple[Part, ...]:
    return networks.WHOLE if view.shares_extractor else (Part.CLASSIFIER,)


def in_best_order(guesses: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return the guesses [N, C, H, W] in the order with the smallest squared distances to the true images."""
    cost = torch.cdist(truth.flatten(1), guesses.flatten(1)).square()
    return guesses[linear_sum_assignment(cost.numpy())[1]]


def _of_round(case: Case, attacker: _Attacker, setting: Setting, streams: Streams, tick: Tick) -> Result:
    """Attack the weight difference; each class's guess is compared with its most similar training image."""
    view, train = case.view, case.truth.train
    found = attacker.guess([round_difference(view, _sent_parts(view))], setting, streams.generator("search"))
    tick()
    classes = train.labels.unique()
    pools = [unit_pixels(train.images[train.labels == label]) for label in classes]

    def beside_nearest(guesses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(guesses, pools, strict=True)
        return guesses, torch.stack([pool[measures.nearest_row(one, pool)] for one, pool in pairs])

    first = ImageSet(torch.stack([(pool[0] * 255).byte() for pool in pools]), classes, train.classes)
    trivial = trivial_images(view, first, streams.generator("floor"))
    floors = {name: beside_nearest(guess) for name, guess in trivial}
    return Result(setting, Reconstructions(*beside_nearest(found.pixels[classes]), floors), found.diverged)


def _controls(results: Sequence[Result]) -> Iterator[Control]:
    """Yield the ceilings as controls: the audited network at its audited weights, the device's own extractor, a prior."""
    for what, of_features in (("gradients", False), ("features", True)):
        some = [one for one in results if one.setting.is_ceiling and one.setting.match.is_of_features == of_features]
        if not some:
            continue
        images = max((one.images for one in some), key=lambda images: images.mean("psnr"))
        value, floor = images.mean("psnr"), float(images.best_floor("psnr")[1].mean())
        yield Control(
            f"PSNR in dB from {what}, the audited network with the device's own extractor ({len(images.truth)} images)",
            value,
            f"at least {_CONTROL_GAIN_DB:g} dB above the floor of {floor:.2f} dB",
            value - floor >= _CONTROL_GAIN_DB,
        )


def _results(trial: Trial, plan: Sequence[Setting], images: ImageSet, tick: Tick) -> Iterator[Result]:
    case, true, streams = trial.case, trial.case.model(), trial.streams
    assert true is not None
    known, stream = case.view.auxiliary, streams.generator("components")
    space = None if known is None else PrincipalComponents(known, _COMPONENTS, stream)
    attackers: dict[tuple[Extractor, bool], _Attacker] = {}
    for setting in plan:
        source, run, place = setting.extractor, streams.at(setting.words), (setting.extractor, setting.rows == 1)
        if place not in attackers:
            view = case.view.with_private(true) if source is Extractor.TRUE else case.view
            revealed = _revealed(view, true, images) if setting.rows == 1 else None
            count = trial.effort.of(1, 3, 5) if source is Extractor.SURROGATE else 1
            models = [
                gradients.attacker_model(view, source, streams.at(number), trial.effort.of(10, 20, 60), revealed)
                for number in range(count)
            ]
            attackers[place] = _Attacker(view, models, space)
            tick()
        if setting.rows:
            yield _of_batches(attackers[place], true, setting, images.rows(range(setting.used(len(images)))), run, tick)
        else:
            yield _of_round(case, attackers[place], setting, run, tick)


def _revealed(view: View, true: Parts, images: ImageSet) -> ImageSet | None:
    """Return the features and labels that the gradients of single images reveal; None if the first linear layer is not next to the extractor."""
    seen, shape = _gradients_of(view, true, images), feature_shape(view.spec)
    model = networks.whole_model(view.spec, true)
    features = torch.stack([gradients.revealed_features(model, one) for one in seen])
    if features.shape[1] != int(np.prod(shape)):
        return None
    labels = torch.cat([gradients.revealed_labels(one) for one in seen])
    return ImageSet(features.unflatten(1, shape), labels, view.spec.classes)


def _figures(results: Sequence[Result], streams: Streams) -> Iterator[Figure]:
    """Yield PSNR and SSIM of every setting; the ceiling is the best result for one image without noise, with the device's own extractor and a prior."""
    for name in measures.MEASURES:
        ceiling = max((one.images.mean(name) for one in results if one.setting.is_ceiling), default=None)
        for setting, images in ((one.setting, one.images) for one in results):
            given = setting.extractor is Extractor.TRUE or not setting.rows
            seed = streams.seed("bootstrap", name)
            figure = images.figure(name, setting.words, setting.knowledge, None if given else ceiling, seed)
            yield replace(figure, rows=setting.rows)


def _pictures(results: Sequence[Result]) -> Iterator[Pictures]:
    """Yield originals above reconstructions: single images in one table, batches and the round in one each."""
    titles = {0: "From the round's weight difference", 1: "From one image's gradient"}
    for rows in sorted({one.setting.rows for one in results}):
        same = [one for one in results if one.setting.rows == rows]
        first = same[0].images.truth[:_SHOWN]
        lines, captions = [("original", tuple(map(measures.png, first)))], [("",) * len(first)]
        for one in same if rows else same[:1]:
            guesses, truth = one.images.guesses[:_SHOWN], one.images.truth[:_SHOWN]
            lines.append((one.setting.words, tuple(map(measures.png, guesses))))
            captions.append(tuple(f"{value:.1f} dB" for value in measures.psnr(guesses, truth)))
        yield Pictures(titles.get(rows, f"Batches of {rows}"), tuple(lines), tuple(captions))


def _notes(results: Sequence[Result]) -> Iterator[str]:
    floors = next(one for one in results if one.setting.rows == 1).images.floors
    values = {name: float(measures.psnr(*pair).mean()) for name, pair in floors.items()}
    guesses = "; ".join(f"{name} {value:.2f}" for name, value in values.items())
    unlabelled, diverged = max(list(values.values())[:3]), np.mean([one.diverged for one in results])
    yield f"Trivial guesses, PSNR in dB: {guesses}. The best one without labels: {unlabelled:.2f}. The nearest image is not a guess: choosing it takes the right image."
    yield (
        "The papers' 6.23 dB for FedSplit is the clamped noise from which a search starts: nothing was reconstructed. "
        f"That noise scores {values['clamped noise']:.2f} dB here."
    )
    yield f"{diverged:.0%} of the searches diverged (the loss was not finite, or above its initial value)."


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, effort, streams, train = trial.case, trial.effort, trial.streams, trial.truth.train
    order = torch.randperm(len(train), generator=streams.generator("images"))
    images = train.rows(order[: effort.of(16, 16, 32)])
    plan = [one for one in settings_of(case.view, effort) if one.rows <= len(images)]
    prepared = len({(one.extractor, one.rows == 1) for one in plan})
    tick = trial.steps(sum(one.searches(len(images)) for one in plan) + prepared)
    results = list(_results(trial, plan, images, tick))
    yield from _controls(results)
    yield from _figures(results, streams)
    yield from _pictures(results)
    yield from _notes(results)


ATTACK = Attack(
    "inversion",
    "Gradient inversion",
    "Can images be reconstructed from what was sent?",
    "DLG (Zhu 2019), iDLG (Zhao 2020), Geiping 2020 eq. 4, FedCG eq. 7-8",
    _carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    private=True,
    lacking=lambda case: gradients.lacks_closed_form(case.view.spec),
    least_side=16,
)
