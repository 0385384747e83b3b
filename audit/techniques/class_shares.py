"""Infers the class shares of a round's clients from their whole updates, after many steps, without real images. Does not use the truth.

* readout: a classifier trained on shares pi predicts pi for inputs without a class (the label shift of Saerens et al.
  2002). Its mean prediction over probes is read: samples of the sent generator, or random numbers without one;
* responses: the last layer's change against shares, calibrated on classifiers that the attacker trains from the same
  aggregate on probes with shares that it knows (after RLU, Ma et al. ICLR 2023, whose responses are of one step and of
  SGD; training covers any optimiser). The cohort's mean change is subtracted, since it says nothing about this client;
* adjusted: responses of classifiers that are trained with `balance = logits`, as an agent does by default;
* bias: softmax of the change of the last biases, as it is and in standard deviations;
* generator: rare classes are trained less. Movement of the label embedding's row (and towards zero, the only effect of
  weight decay on a row without images), of the class's mean feature and of its spread, and how well the received
  classifier recognises the class; weighted to fit all clients' shares as the two above infer them;
* together: geometric mean of readout, generator and those responses whose sizes are nearer to the observed ones. A class
  that one of them excludes counts little.

The last one always leads the report: which of the others is the most exact depends on the method. With a generator
trained against a discriminator, it is the readout. Which class random numbers resemble is chance, and a classifier
trained to recognise another generator's samples (FedMD-CG) predicts all classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import nn

from audit.evidence import View
from audit.evidence.networks import plain_params
from audit.techniques.image_decoder import descend
from fedcg.learning.mechanisms.protected_round import log_prior
from fedcg.learning.method import Weights
from fedcg.learning.networks import build_part, feature_shape, load_part, weights_of
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import generate, steps_of
from fedcg.learning.training.optimisers import task_optimiser
from fedcg.wire.parts import Part

HEADLINE = "together"
_PROBES = 600  # in total; at least _LEAST_OF_CLASS per class
_LEAST_OF_CLASS = 4
_CONCENTRATIONS = (0.2, 0.5, 1.0, 3.0)  # of the shadows' shares: from a class or two to nearly all alike
_UNKNOWN_EXAMPLES = 1000
_RIDGE = 1e-3
_LEAST_SHARE = 1e-3  # so that a single wrong zero does not decide
Shares = Mapping[str, torch.Tensor]
"""Shares or counts of the classes, [C] or [clients, C] with the audited client first, by technique."""
Tick = Callable[[], None]


def probes_for(spec: FederationSpec, generator: Weights | None, stream: torch.Generator) -> torch.Tensor:
    """Features that an attacker generates, [C, R, *feature_shape]: R samples of a generator per class, or numbers between 0 and 1."""
    each = max(_LEAST_OF_CLASS, _PROBES // spec.class_count)
    shape = (spec.class_count, each, *feature_shape(spec))
    if generator is None:
        return torch.rand(shape, generator=stream)
    labels = torch.arange(spec.class_count).repeat_interleave(each)
    noise = torch.randn(len(labels), spec.network.noise_dim, generator=stream)
    return generate(load_part(spec, Part.GENERATOR, generator), noise, labels).view(shape)


def last_layer(classifier: nn.Module, classes: int) -> str | None:
    """Return the name of the linear layer with a bias that computes the logits; None if there is none."""
    found = [(name, module) for name, module in classifier.named_modules() if isinstance(module, nn.Linear)]
    name, last = found[-1] if found else (None, None)
    return name if last is not None and last.out_features == classes and last.bias is not None else None


def response(spec: FederationSpec, before: Weights, after: Weights) -> torch.Tensor:
    """Return the change of the last layer, [C, 4]: of its biases, of its rows' sums and norms, and the log of its size; each with mean 0 over the classes."""
    layer = last_layer(build_part(spec, Part.CLASSIFIER), spec.class_count)
    bias = after[f"{layer}.bias"] - before[f"{layer}.bias"]
    old, new = before[f"{layer}.weight"], after[f"{layer}.weight"]
    moved = ((new - old).norm(dim=1) + 1e-9).log()
    return _centred(torch.stack([bias, (new - old).sum(1), new.norm(dim=1) - old.norm(dim=1), moved], 1))


def _centred(values: torch.Tensor) -> torch.Tensor:
    return values - values.mean(-2, keepdim=True)


def fitted(values: torch.Tensor, shares: torch.Tensor, ridge: float = _RIDGE) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit a conditional logit: shares [K, C] = softmax over the classes of values [K, C, F] @ w; classes are exchangeable, so w has F numbers.

    Returns:
        The function from values [..., C, F] to shares [..., C].
    """
    scale = values.flatten(0, 1).std(0) + 1e-8
    scaled, wanted = (values / scale).double(), shares.double()

    def loss(weights: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        given = torch.from_numpy(weights)
        logits = (scaled @ given).log_softmax(1)
        value = -(wanted * logits).sum() / len(wanted) + ridge * given.square().sum()
        slope = torch.einsum("kc,kcf->f", logits.exp() - wanted, scaled) / len(wanted) + 2 * ridge * given
        return float(value), slope.numpy()

    found = torch.from_numpy(minimize(loss, np.zeros(values.shape[2]), jac=True, method="L-BFGS-B").x).float() / scale
    return lambda some: (some @ found).softmax(-1)


def by_responses(
    view: View, streams: Streams, shadows: int, most: int, tick: Tick, *, adjusted: bool = False
) -> Callable[[Sequence[Weights]], tuple[torch.Tensor, float]]:
    """Return how to infer shares from the last layer's change, calibrated on classifiers that are trained on probes.

    Args:
        view: gives start, training parameters and examples.
        streams: for probes, shares and batches.
        shadows: number of classifiers.
        most: most steps of each.
        tick: called after each.
        adjusted: whether they train with `balance = logits`.

    Returns:
        The function from classifiers, the audited client's first, to shares [clients, C], and the distance of log sizes
        of the audited client's change from those of the shadows.
    """
    spec, before = view.spec, view.before.parts[Part.CLASSIFIER]
    probes = probes_for(spec, view.before.parts.get(Part.GENERATOR), streams.generator("shadow probes"))
    drawn = np.random.default_rng(streams.seed("shadow shares"))
    values, shares = [], []
    for shadow in range(shadows):
        concentration = _CONCENTRATIONS[shadow % len(_CONCENTRATIONS)]
        known = torch.from_numpy(drawn.dirichlet([concentration] * spec.class_count)).float()
        after = _trained_on(view, probes, known, streams.generator("shadow", shadow), most, adjusted=adjusted)
        values.append(response(spec, before, after))
        shares.append(known)
        tick()

    def infer(sent: Sequence[Weights]) -> tuple[torch.Tensor, float]:
        seen = torch.stack([response(spec, before, one) for one in sent])
        changed = seen.abs().amax((0, 1)) > 0  # `balance = bias` sends the last bias as it was
        sizes = [((one * changed).std(-2) + _LEAST_SHARE).log() for one in (seen[0], torch.stack(values))]
        centre = 0 if len(sent) == 1 else seen.mean(0)
        found = fitted(torch.stack(values) * changed, torch.stack(shares))(seen - centre)
        return found, float((sizes[0] - sizes[1].mean(0)).abs().sum())

    return infer


def by_bias(view: View, sent: Sequence[Weights]) -> Shares:
    """Return shares [clients, C]: softmax of the change of the last biases, as it is and in standard deviations over the classes."""
    name = f"{last_layer(build_part(view.spec, Part.CLASSIFIER), view.spec.class_count)}.bias"
    moved = torch.stack([one[name] - view.before.parts[Part.CLASSIFIER][name] for one in sent])
    return {"bias": moved.softmax(1), "bias, standardised": (_centred(moved.T) / (moved.T.std(0) + 1e-9)).T.softmax(1)}


def _trained_on(
    view: View, probes: torch.Tensor, shares: torch.Tensor, stream: torch.Generator, most: int, *, adjusted: bool
) -> Weights:
    """Return the aggregate's classifier after a round's steps on probes with these shares, as a client would send it."""
    examples = view.report.examples or _UNKNOWN_EXAMPLES
    prior = log_prior([round(float(share) * examples) for share in shares]) * adjusted
    params = view.method.params_type.model_validate(plain_params(view.spec.params))
    network = load_part(view.spec, Part.CLASSIFIER, view.before.parts[Part.CLASSIFIER]).train()
    optimiser = task_optimiser(network.parameters(), params)
    for _ in range(min(most, steps_of(params, examples))):
        labels = torch.multinomial(shares, params.batch_size, replacement=True, generator=stream)
        rows = torch.randint(probes.shape[1], labels.shape, generator=stream)
        loss = nn.functional.cross_entropy(network(probes[labels, rows]) + prior, labels)
        descend(optimiser, loss)
    return weights_of(network)


@torch.no_grad()
def by_readout(view: View, parts: Mapping[Part, Weights], streams: Streams) -> torch.Tensor:
    """Return shares [C]: a received classifier's mean prediction on probes of the received generator, or of the aggregate's."""
    generator = parts.get(Part.GENERATOR, view.before.parts.get(Part.GENERATOR))
    probes = probes_for(view.spec, generator, streams.generator("readout"))
    classifier = load_part(view.spec, Part.CLASSIFIER, parts[Part.CLASSIFIER]).eval()
    predicted: torch.Tensor = classifier(probes.flatten(0, 1)).softmax(1).mean(0)
    return predicted


@torch.no_grad()
def generator_statistics(view: View, before: Weights, parts: Mapping[Part, Weights], streams: Streams) -> torch.Tensor:
    """Return the movements of a sent generator, [C, 5], each with mean 0 over the classes; see the module's docstring."""
    spec, after = view.spec, parts[Part.GENERATOR]
    old, new = (probes_for(spec, one, streams.generator("statistics")) for one in (before, after))
    row = before["embedding.weight"]
    moved = after["embedding.weight"] - row
    logits = load_part(spec, Part.CLASSIFIER, parts[Part.CLASSIFIER]).eval()(new.flatten(0, 1))
    own = logits.log_softmax(1).view(*new.shape[:2], -1)
    old, new = old.flatten(2), new.flatten(2)
    columns = (
        (moved.norm(dim=1) + 1e-9).log(),
        (moved * row.sign()).mean(1),
        ((new - old).mean(1).norm(dim=1) + 1e-9).log(),
        (new.std(1).mean(1) + 1e-6).log() - (old.std(1).mean(1) + 1e-6).log(),
        own.mean(1).diagonal(),
    )
    return _centred(torch.stack(columns, 1))


def inferred(view: View, streams: Streams, shadows: int, most: int, tick: Tick) -> Shares:
    """Infer each client's class shares from the updates of a round, [clients + 1, C]; the audited client first.

    Last: what would be read if the audited client had sent the aggregate before the round, so that only the others'
    updates speak. `HEADLINE` is first. `shadows` and `most` are those of `by_responses`.
    """
    readers = [by_responses(view, streams, shadows, most, tick, adjusted=adjusted) for adjusted in (False, True)]
    unchanged = {part: view.before.parts.get(part, weights) for part, weights in view.update.items()}
    found, blind = (_read(replace(view, update=update), readers, streams) for update in (view.update, unchanged))
    return {name: torch.cat([shares, blind[name][:1]]) for name, shares in found.items()}


def _read(view: View, readers: Sequence[Callable[..., tuple[torch.Tensor, float]]], streams: Streams) -> Shares:
    sent = [view.update, *(view.others[name] for name in sorted(view.others))]
    classifiers = [one[Part.CLASSIFIER] for one in sent]
    plain, adjusted = (read(classifiers) for read in readers)
    found = {
        "readout": torch.stack([by_readout(view, parts, streams) for parts in sent]),
        "responses": min(plain, adjusted, key=lambda one: one[1])[0],
    }
    if Part.GENERATOR in view.update and Part.GENERATOR in view.before.parts:
        old = view.before.parts[Part.GENERATOR]
        values = torch.stack([generator_statistics(view, old, parts, streams) for parts in sent])
        found["generator"] = fitted(values, (found["readout"] + found["responses"]) / 2)(values)
    logs = torch.stack(list(found.values())).clamp(min=_LEAST_SHARE).log()
    together = {HEADLINE: logs.mean(0).softmax(-1), **found}
    return {**together, "responses": plain[0], "adjusted": adjusted[0], **by_bias(view, classifiers)}
