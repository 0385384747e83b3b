"""Infers how many images of each class a device holds, from the classifier (and the generator) that it sends.

From the whole update: `class_shares`. From the gradient of one batch, which a server sees if devices send after every
step:
  * PPIDSG eq. 1-3 (Ma et al. 2024). The formulas are missing in our copy. By the chain rule of eq. 13-14, the gradient
    of the last layer's weights is mean_i (p_ic - y_ic) h_ij, so with S = sum_j h_j its sum over j is about (p_c - n_c /
    N) S, and n_c = N (p_c - sum_j grad_cj / S). p and S come from probes, drawn several times; the most frequent count
    of a class is used (their mode);
  * the gradient of the last bias is mean_i (p_ic - y_ic), so n_c = N (p_c - grad_c), without S.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from torch import nn

from audit.attacks.attack import Attack, Effort, Found, Tick, Trial
from audit.evidence import Case, Knowledge, View, networks
from audit.measures import Chance, Control, Figure, Interval, Measure, Values, bootstrap, chance_in, unit_pixels
from audit.techniques.class_shares import HEADLINE, Shares, by_readout, inferred, last_layer, probes_for
from audit.techniques.gradients import BatchGradient, batch_gradient
from audit.techniques.simulated_clients import (
    THIS_ROUND,
    Plan,
    SimulatedClients,
    followed,
    knowledge,
    simulated_clients,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError, Weights
from fedcg.learning.networks import build_part, load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import extract_features
from fedcg.wire.parts import Part

_DRAWS = 5  # draws of probes, for PPIDSG's mode
_PROBE_IMAGES = 256
_BATCHES = (32, 64, 128)
_CONTROL_IMAGES = 150  # images of each class
_CONTROL_EPOCHS = 20
_NULL = 20_000  # so that a probability can be below 1 % after the correction for 200 tests
_PRIOR_CONCENTRATIONS = (0.1, 0.2, 0.5, 1.0, 3.0, 10.0, 100.0)  # per class
_LEAST_BELIEF = 1e-3  # an attacker excludes no class without the update
_FAR = 6.0  # medians of all changes; the demo's absent classes rise 12 to 60 of them, others at most 5
_FARTHEST = 2.0  # L1 distance of shares without a common class
_WHOLE = (Knowledge.UPDATE, Knowledge.BEFORE, Knowledge.OTHERS)
_OTHERS_ALONE = "the same reading, if the device had sent the aggregate before the round"
_L1 = Measure("label_l1", "Class shares of the device, L1 distance to the truth (0 exact, 2 disjoint)")
Counts = NDArray[np.int16]
Means = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""For each draw of probes, the mean prediction [C] and the mean input [D] of the last layer."""
_ACCURACY = Measure("label_accuracy", "Correct labels of one batch", "share")


def counts_of(shares: torch.Tensor, rows: int) -> torch.Tensor:
    """Return integers [C] that sum to `rows` and are nearest to shares [C] (negative shares count as 0), by largest remainders."""
    shares = shares.clamp(min=0)
    exact = shares / shares.sum() * rows if shares.sum() > 0 else torch.full_like(shares, rows / len(shares))
    counts = exact.floor()
    counts[(exact - counts).argsort(descending=True)[: rows - int(counts.sum())]] += 1
    return counts


def labels_by_bias(bias: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """Return a batch's shares: predicted [C] - gradient of the last bias [C]."""
    return predicted - bias


def labels_by_weight(weight: torch.Tensor, predicted: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return a batch's shares by PPIDSG eq. 3.

    Args:
        weight: gradient of the last layer's weights, [C, D].
        predicted: mean prediction on probes, [C].
        inputs: mean input of the last layer on probes, [D].
    """
    return predicted - weight.sum(1) / inputs.sum()


@torch.no_grad()
def probe_means(
    spec: FederationSpec, parts: Mapping[Part, Weights], streams: Streams, images: ImageSet | None = None
) -> Means:
    """Return PPIDSG's estimates from random images of a set (then with the extractor), or from random features."""
    network, kept, predicted = load_part(spec, Part.CLASSIFIER, parts[Part.CLASSIFIER]).eval(), [], []
    last = network.get_submodule(str(last_layer(network, spec.class_count)))
    last.register_forward_pre_hook(lambda _, given: kept.append(given[0].mean(0)))
    for draw in range(_DRAWS):
        stream = streams.generator("probes", draw)
        if images is None:
            probes = probes_for(spec, parts.get(Part.GENERATOR), stream).flatten(0, 1)
        else:
            some = images.rows(torch.randperm(len(images), generator=stream)[:_PROBE_IMAGES])
            probes = extract_features(load_part(spec, Part.EXTRACTOR, parts[Part.EXTRACTOR]), some.images, spec)
        predicted.append(network(probes).softmax(1).mean(0))
    return list(zip(predicted, kept, strict=True))


def guessed_batch(spec: FederationSpec, seen: BatchGradient, means: Means) -> Shares:
    """Return class counts [C] of a batch, by the gradient they come from; the mode over several draws of probes."""
    network = build_part(spec, Part.CLASSIFIER)
    layer = last_layer(network, spec.class_count)
    gradients = dict(zip((name for name, _ in network.named_parameters()), seen.values, strict=True))
    weight, bias = gradients[f"{layer}.weight"], gradients[f"{layer}.bias"]
    found = {
        "weight gradient, PPIDSG eq. 3": [labels_by_weight(weight, predicted, inputs) for predicted, inputs in means],
        "bias gradient": [labels_by_bias(bias, predicted) for predicted, _ in means],
    }
    return {
        name: counts_of(torch.stack([counts_of(one, seen.rows) for one in some]).mode(0).values, seen.rows)
        for name, some in found.items()
    }


def trivial_guesses(view: View, streams: Streams) -> dict[str, torch.Tensor]:
    """Return shares [C] that use nothing of the client: uniform, and the federation's mean: published, or read from the aggregate before the round and inferred from other updates."""
    count = view.spec.class_count
    found = {"every class alike": torch.full((count,), 1 / count)}
    if view.before.label_distribution is not None:
        return {**found, "the federation's published mean": torch.tensor(view.before.label_distribution)}
    if Part.CLASSIFIER in view.before.parts:
        found["the mean read from the aggregate before the round"] = by_readout(view, view.before.parts, streams)
    if view.others and Part.CLASSIFIER in view.update:
        shares = [by_readout(view, parts, streams) for parts in view.others.values()]
        found["the mean inferred from the others' updates"] = torch.stack(shares).mean(0)
    return found


def _distance(guess: torch.Tensor, true: torch.Tensor | Values) -> float:
    """L1, between 0 and 2."""
    return float(_distances([guess], np.asarray(true, dtype=np.float64)[None])[0])


def _shares_of(images: ImageSet) -> torch.Tensor:
    return torch.tensor(images.label_counts(), dtype=torch.float64) / len(images)


def drawn_truths(centre: torch.Tensor, trivial: Shares, true: Values, examples: int, seed: int) -> Values:
    """Draw 20,000 label multisets that an attacker without the update believes in, as shares [20,000, C].

    Shares are Dirichlet around a trivial guess, at concentrations per class from 0.1 (one or two classes) to 100 (almost
    the guess); the labels of the images are multinomial. Of seven times as many draws those remain whose distance to the
    nearest trivial guess is most similar to the truth's. How skewed a device is says nothing about the update, and more
    skew makes larger gains by chance.

    Args:
        centre: the trivial guess [C].
        trivial: all guesses without the update, [C].
        true: the device's shares [C].
        examples: number of its images.
        seed: of the draws.
    """
    stream, mean = np.random.default_rng(seed), centre.double().clamp(min=_LEAST_BELIEF).numpy()
    scales = np.array(_PRIOR_CONCENTRATIONS) * len(mean) / mean.sum()
    drawn = np.concatenate([stream.multinomial(examples, stream.dirichlet(one * mean, _NULL)) for one in scales])
    found: Values = drawn / examples
    far = np.abs(_distances(trivial.values(), found) - _distances(trivial.values(), true[None]))
    return found[np.argsort(far, kind="stable")[:_NULL]]


def _distances(guesses: Iterable[torch.Tensor], truths: Values) -> Values:
    """Return the L1 distance of the nearest guess [C] to each truth [N, C]."""
    found: Values = np.min([np.abs(truths - one.double().numpy()).sum(1) for one in guesses], axis=0)
    return found


def chances(
    guesses: Shares, trivial: Shares, true: Values, examples: int, seed: int, unchanged: Shares | None = None
) -> dict[str, Chance]:
    """Return the probability of at least this gain over the floor for each guess [C]: the largest over the attacker's possible beliefs.

    The smallest that the test can give is that of the exact shares. `unchanged` are further floors, each of one guess.
    """
    tried = {**guesses, "": torch.from_numpy(true)}  # the last: a perfect attack
    found = dict.fromkeys(tried, 0.0)
    for centre in trivial.values():
        truths = np.vstack([true, drawn_truths(centre, trivial, true, examples, seed)])
        floors = _distances(trivial.values(), truths)
        for name, guess in tried.items():
            own = (unchanged or {}).get(name)
            floor = floors if own is None else np.minimum(floors, _distances([own], truths))
            gains = floor - _distances([guess], truths)
            found[name] = float(np.maximum(found[name], chance_in(gains[0], gains[1:])))
    return {name: Chance(found[name], found[""]) for name in guesses}


def _batch_chance(guesses: Counts, trivial: Sequence[Counts], truths: Counts, seed: int) -> float:
    """Return the probability of at least this gain if classes are exchangeable: 20,000 orders of the classes, one for all batches of the device.

    Batches of one device have similar labels, so that they are not independent.

    Args:
        guesses: [batches, C].
        trivial: guesses without the gradient, [C].
        truths: [batches, C].
        seed: of the orders.
    """
    plain = np.arange(truths.shape[1])
    orders = np.random.default_rng(seed).permuted(np.tile(plain, (_NULL, 1)), axis=1)
    moved = truths[:, np.vstack([plain, orders])]
    floor = np.max([np.minimum(one, moved).sum((0, 2), dtype=np.float64) for one in trivial], axis=0)
    gains = np.minimum(guesses[:, None], moved).sum((0, 2), dtype=np.float64) - floor
    return chance_in(float(gains[0]), gains[1:])


def update_figures(case: Case, guesses: Shares, trivial: Shares, unchanged: Shares | None = None) -> Iterator[Figure]:
    """Score the whole-update guesses against the truth; intervals cover other draws of as many images with the same shares.

    Args:
        case: of the audit.
        guesses: [clients, C] by reading, the audited one first.
        trivial: guesses without the update, [C].
        unchanged: by reading, what it gives if the device had sent the aggregate before the round, [C]: then only the
            others' updates speak. A floor of that reading alone.
    """
    unchanged = unchanged or {}
    rows = nn.functional.one_hot(case.truth.train.labels, case.view.spec.class_count).double().numpy()
    true, seed = rows.mean(0), case.streams.seed("labels", "bootstrap")
    readings = {name: guess[0] for name, guess in guesses.items()}
    likely = chances(readings, trivial, true, len(rows), seed, unchanged)

    def interval(statistic: Callable[[Values], float]) -> Interval:
        # Resamples are never nearer to equal shares than the data: keep the value inside the interval.
        found = bootstrap(rows, seed, lambda some: statistic(some.mean(0)))
        return Interval(found.value, min(found.low, found.value), max(found.high, found.value))

    def figure(name: str, guess: torch.Tensor) -> Figure:
        floors = {**trivial, **({_OTHERS_ALONE: unchanged[name]} if name in unchanged else {})}
        best = min(floors, key=lambda one: _distance(floors[one], true))
        return _L1.figure(
            f"whole update, {name}",
            (*_WHOLE, *knowledge(name)),
            interval(lambda shares: _distance(guess, shares)),
            (best, _distance(floors[best], true)),
            len(rows),
            gain=interval(lambda shares: _distance(floors[best], shares) - _distance(guess, shares)),
            ceiling=None if case.view.report.label_counts is None else 0.0,
            chance=likely[name],
        )

    return (figure(name, guess[0]) for name, guess in guesses.items())


def _batch_figures(case: Case, size: int, batches: int, trivial: Shares) -> Iterator[Figure]:
    """Return the share of a batch's labels that are correct (PPIDSG's success rate), over random batches at the round's start."""
    spec, train, model = case.view.spec, case.truth.train, case.model()
    assert model is not None
    streams = case.streams.at("labels", "batches", size)
    auxiliary = case.view.auxiliary if case.view.shares_extractor else None
    means, stream = probe_means(spec, case.view.before.parts, streams, auxiliary), streams.generator("rows")
    extra = () if auxiliary is None else (Knowledge.AUXILIARY,)
    counted: dict[str, list[torch.Tensor]] = {"true": []}
    for _ in range(batches):
        some = train.rows(torch.randperm(len(train), generator=stream)[:size])
        seen = batch_gradient(spec, model, unit_pixels(some.images), some.labels, (Part.CLASSIFIER,))
        for name, counts in guessed_batch(spec, seen, means).items():
            counted.setdefault(name, []).append(counts)
        counted["true"].append(torch.tensor(some.label_counts()))
    found = {name: torch.stack(counts).numpy().astype(np.int16) for name, counts in counted.items()}
    truths = found.pop("true")
    plain = {name: counts_of(shares, size).numpy().astype(np.int16) for name, shares in trivial.items()}
    floors = [(name, np.minimum(counts, truths).sum(1) / size) for name, counts in plain.items()]
    least = _batch_chance(truths, list(plain.values()), truths, streams.seed("orders"))
    for name, guesses in found.items():
        setting, used = f"batches of {size}, {name}", (Knowledge.BATCH, Knowledge.BEFORE, *extra)
        likely = Chance(_batch_chance(guesses, list(plain.values()), truths, streams.seed("orders")), least)
        right = np.minimum(guesses, truths).sum(1) / size
        figure = _ACCURACY.paired(setting, used, right, floors, streams.seed("bootstrap"), chance=likely)
        yield replace(figure, rows=size)


def single_class_control(case: Case) -> Control:
    """Test on a batch of one class with an untrained LeNet5 with sigmoids, where PPIDSG's tables have 100 %."""
    spec = case.view.spec
    if len(spec.input.tensor_shape) == 3 and min(spec.input.tensor_shape[1:]) >= 16:
        spec = networks.with_lenet5(spec)
    model, streams = initial_parts(spec, spec_root(spec.seed)), case.streams.at("labels", "single class")
    some = _images_of(case.truth.train, 1, min(_BATCHES))
    seen = batch_gradient(spec, model, unit_pixels(some.images), some.labels, (Part.CLASSIFIER,))
    auxiliary = case.view.auxiliary if case.view.shares_extractor else None
    parts = {part: model[part] for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    found = guessed_batch(spec, seen, probe_means(spec, parts, streams, auxiliary))
    true = torch.tensor(some.label_counts())
    worst = min(float(torch.minimum(counts, true).sum()) / len(some) for counts in found.values())
    title = "A batch of one class, untrained LeNet5 with sigmoids: correct labels"
    return Control(title, worst, "1", worst > 0.99, _ACCURACY.name)


def two_class_control(case: Case, what: str, infer: Callable[[ImageSet, Streams], torch.Tensor]) -> Control:
    """Attack the update of a simulated client of the same method with two classes, or one if there are fewer than four.

    Args:
        case: provides the images.
        what: the setting of the attack.
        infer: simulates the client with these images and attacks it: shares [C].
    """
    view, streams = case.view, case.streams.at("labels", "two classes")
    some = _images_of(case.truth.train, 2 if view.spec.class_count >= 4 else 1, _CONTROL_IMAGES)
    true, title = _shares_of(some), f"Class shares of a simulated client with two classes, {what}: L1 distance"
    limit = min(_distance(guess, true) for guess in trivial_guesses(view, streams).values()) / 2
    try:
        found = _distance(infer(some, streams), true)
    except DivergedError:  # as GANs do on few images: then the control is inconclusive
        found, title = _FARTHEST, f"{title} (its training diverged)"
    return Control(title, found, f"at most {limit:.2f}, half of the best trivial guess", found <= limit, _L1.name)


def headline_control(case: Case, effort: Effort, tick: Tick, clients: SimulatedClients | None = None) -> Control:
    """Run `two_class_control` for the setting that leads the report: that of simulated clients, if there are any."""

    def of_shadows(some: ImageSet, own: Streams) -> torch.Tensor:
        view = networks.of_simulated_client(case.view, some, own, _CONTROL_EPOCHS)
        return inferred(view, own, *_shadow_work(effort), tick)[HEADLINE][0]

    def of_clients(some: ImageSet, own: Streams) -> torch.Tensor:
        assert clients is not None
        sent = followed(case.view, clients.rounds, some, clients.privacy, own)
        return next(iter(clients.inferred(sent).values()))[0]

    what, infer = (HEADLINE, of_shadows) if clients is None else ("simulated clients", of_clients)
    return two_class_control(case, what, infer)


def _images_of(images: ImageSet, classes: int, of_each: int) -> ImageSet:
    """Return the first images of the most frequent classes."""
    chosen = torch.tensor(images.label_counts()).argsort(descending=True)[:classes]
    return images.rows(torch.cat([(images.labels == label).nonzero().flatten()[:of_each] for label in chosen]))


def absent_classes(view: View) -> Iterator[str]:
    """Yield a note on classes whose last bias rose far more than the others': devices with `balance = logits` show so that they have no image of them.

    Adam takes the same step for a tiny gradient of constant sign as for a large one. Of ten classes a right guess has a
    probability of a tenth without the update, so no test can make it a finding.
    """
    name = f"{last_layer(build_part(view.spec, Part.CLASSIFIER), view.spec.class_count)}.bias"
    moved = view.update[Part.CLASSIFIER][name] - view.before.parts[Part.CLASSIFIER][name]
    rose = torch.nonzero(moved > _FAR * moved.abs().median()).flatten().tolist()
    if rose and moved.abs().median() > 0:
        names = ", ".join(view.spec.classes[at] for at in rose)
        yield f"The last bias rose for {names} far more than for the other classes: an attacker takes that for a class without an image."


def _notes(headline: Figure, guess: torch.Tensor, true: torch.Tensor) -> Iterator[str]:
    rank = float(spearmanr(guess.numpy(), true.numpy()).statistic)
    told = "with label_counts it is exact" if headline.ceiling == 0.0 else "label_counts are not reported here"
    yield (
        f"Effect of leaving label_counts out: the update alone gives the class shares with an L1 distance of "
        f"{headline.value.value:.2f}, compared with {headline.floor:.2f} for the best trivial guess; {told}."
    )
    yield f"Rank correlation (Spearman) of inferred and true shares: {rank:.2f}."
    yield (
        "Only simulated clients use images, auxiliary ones: other probes are samples of the sent generator or random numbers. "
        "Intervals of label_l1 cover the device's images; they do not cover other training runs."
    )


def _carry_out(trial: Trial) -> Iterator[Found]:
    case, effort, streams = trial.case, trial.effort, trial.streams
    private = case.truth.before is not None
    sizes = [size for size in _BATCHES if size <= len(case.truth.train)] if private else []
    plan = Plan.of(case.view, case.truth.privacy, effort.of(12, 32, 96), effort.of(5000, 30_000, 300_000))
    inferences, runs = (4, 0) if plan is None else (2, plan.runs)
    tick = trial.steps(inferences * _shadow_work(effort)[0] + len(sizes) + 1 + runs)
    trivial = trivial_guesses(case.view, streams)
    clients = simulated_clients(case.view, plan, streams.at("simulated"), tick)
    guesses = {} if clients is None else dict(clients.inferred())
    leading = next(iter(guesses), HEADLINE)
    blind = {} if clients is None else clients.inferred([one.before.parts for one in clients.rounds])
    # Earlier rounds' aggregates hold the device's own updates: over all rounds this would be no floor without them.
    unchanged = {name: shares[0] for name, shares in blind.items() if name == THIS_ROUND}
    found = inferred(case.view, streams, *_shadow_work(effort), tick)
    unchanged |= {name: shares[-1] for name, shares in found.items()}
    guesses |= found
    if case.view.report.label_counts is not None:
        counts = torch.tensor(case.view.report.label_counts, dtype=torch.float32)
        guesses["label counts as reported"] = (counts / counts.sum())[None]
    headline, *others = update_figures(case, guesses, trivial, unchanged)
    yield headline
    yield from others
    for size in sizes:
        yield from _batch_figures(case, size, effort.of(16, 64, 256), trivial)
        tick()
    yield single_class_control(case)
    yield headline_control(case, effort, tick, clients)
    tick()
    true, guess = _shares_of(case.truth.train), guesses[leading][0]
    pairs = zip(case.view.spec.classes, true, guess, strict=True)
    yield f"Class shares, true and inferred: {', '.join(f'{name} {own:.0%} and {read:.0%}' for name, own, read in pairs)}."
    yield from _notes(headline, guess, true)
    yield from absent_classes(case.view)
    if not private:
        yield f"Single batches were not tried: {case.lacks(private=True)}."


def _lacks(case: Case) -> str | None:
    spec = case.view.spec
    if last_layer(build_part(spec, Part.CLASSIFIER), spec.class_count) is None:
        return f"the classifier of {spec.network.split} does not end in a linear layer with a bias"
    return None


def _shadow_work(effort: Effort) -> tuple[int, int]:
    """Return the number of shadow classifiers, and their maximum number of steps."""
    return effort.of(4, 8, 24), effort.of(1000, 4000, 20_000)


ATTACK = Attack(
    name="labels",
    title="Label distribution",
    question="Does the update show how many images of each class the device has?",
    source="PPIDSG eq. 1-3; RLU (Ma et al. 2023); label shift (Saerens et al. 2002)",
    carry_out=_carry_out,
    parts=frozenset({Part.CLASSIFIER}),
    lacking=_lacks,
)
