"""Leaks planted into recorded updates, for `fedcg bench privacy plants`: copies, low bits, memorised images, class counts, overfit classifiers."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from audit.evidence import Case, networks
from audit.techniques.image_decoder import descend
from audit.techniques.shadow_models import mean_parts
from fedcg.learning.method import Weights
from fedcg.learning.networks import load_part, weights_of
from fedcg.learning.training.batches import extract_features
from fedcg.values import Value
from fedcg.wire.parts import Part

Put = Callable[[Case, float, torch.Generator], Case]
"""(the recorded case, with private weights; the strength; a stream) -> the case with the plant."""
_LEVELS = 127  # of the codec i8
_STEPS, _RATE, _BATCH = 3000, 3e-3, 64  # of a generator that memorises
_ROWS = 3


def _sending(case: Case, part: Part, weights: Weights) -> Case:
    """Return the case with these tensors of a part in the update."""
    update = {**case.view.update, part: {**case.view.update[part], **weights}}
    return replace(case, view=replace(case.view, update=update))


def as_sent(case: Case) -> Case:
    """Return the case with the update as the codec i8-delta sends it."""
    update = {
        part: {name: coded(case, part, name) if one.ndim > 1 else one for name, one in weights.items()}
        for part, weights in case.view.update.items()
    }
    return replace(case, view=replace(case.view, update=update))


def _extractor(case: Case) -> Weights:
    """Return the private extractor after the round."""
    assert case.truth.after is not None
    return case.truth.after[Part.EXTRACTOR]


def _largest(weights: Weights) -> str:
    return max(weights, key=lambda name: weights[name].numel() * (weights[name].ndim > 1))


def coded(case: Case, part: Part, name: str, extra: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor of the update as the codec i8-delta sends it; `extra` replaces the lowest bit of its codes where it is not negative."""
    weight, start = case.view.update[part][name], case.view.before.parts[part][name]
    step = (weight - start).flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, *[1] * (weight.ndim - 1)) / _LEVELS
    code = ((weight - start) / step).round()
    if extra is not None:
        code = torch.where((extra >= 0) & (code.abs() < _LEVELS - 1), (code / 2).floor() * 2 + extra, code)
    return start + code * step


def _private(case: Case, stream: torch.Generator) -> torch.Tensor:
    """Return rows of the extractor's largest tensor, in random order."""
    weights = _extractor(case)
    rows = weights[_largest(weights)].flatten(1)
    return rows[torch.randperm(len(rows), generator=stream)[:_ROWS]]


def _written(
    case: Case, numbers: torch.Tensor, noise: float, stream: torch.Generator, *, columns: bool = False
) -> Case:
    """Write numbers at a random place of the generator's largest tensor, with its deviation; `noise` is a share of it."""
    name = _largest(case.view.update[Part.GENERATOR])
    weight = case.view.update[Part.GENERATOR][name]
    host, flat = (weight.T if columns else weight).contiguous().clone(), numbers.flatten().float()
    flat = (flat - flat.mean()) / flat.std() + noise * torch.randn(len(flat), generator=stream)
    at = int(torch.randint(host.numel() - len(flat), (), generator=stream))
    host.view(-1)[at : at + len(flat)] = flat * weight.std() + weight.mean()
    return _sending(case, Part.GENERATOR, {name: (host.T if columns else host).contiguous()})


def scaled_rows(case: Case, noise: float, stream: torch.Generator) -> Case:
    """Rows of the extractor, with noise."""
    return _written(case, _private(case, stream), noise, stream)


def coded_rows(case: Case, bits: float, stream: torch.Generator) -> Case:
    """Rows of the extractor as integers of some bits."""
    rows, most = _private(case, stream), 2 ** (bits - 1) - 1
    return _written(case, (rows / rows.abs().amax(1, keepdim=True) * most).round(), 0.0, stream)


def image_in_columns(case: Case, noise: float, stream: torch.Generator) -> Case:
    """A training image down the columns, with noise."""
    images = case.truth.train.images
    return _written(case, images[int(torch.randint(len(images), (), generator=stream))], noise, stream, columns=True)


def low_bits(case: Case, share: float, stream: torch.Generator) -> Case:
    """One bit of the extractor in the lowest bit of the code of a share of the weights."""
    name = _largest(case.view.update[Part.GENERATOR])
    shape = case.view.update[Part.GENERATOR][name].shape
    secret = np.resize(np.unpackbits(_private(case, stream).numpy().view(np.uint8)), shape)
    chosen = torch.rand(shape, generator=stream) < share
    bits = torch.where(chosen, torch.from_numpy(secret).float(), torch.tensor(-1.0))
    return _sending(case, Part.GENERATOR, {name: coded(case, Part.GENERATOR, name, bits)})


def class_counts(case: Case, strength: float, stream: torch.Generator) -> Case:
    """The class shares, times a strength, added to the last bias; small strengths change only its last digits."""
    shares = torch.tensor(case.truth.train.label_counts()) / len(case.truth.train)
    biases = case.view.update[Part.CLASSIFIER].items()
    name, bias = next((name, one) for name, one in biases if one.shape == shares.shape)
    return _sending(case, Part.CLASSIFIER, {name: bias + strength * (shares - shares.mean())})


def memorised_features(case: Case, error: float, stream: torch.Generator) -> Case:
    """A generator whose samples are the features of one training image of each class, up to an error in their deviations."""
    spec, train = case.view.spec, case.truth.train.rows(torch.randperm(len(case.truth.train), generator=stream))
    chosen = train.rows([train.labels.tolist().index(label) for label in train.labels.unique()])
    extractor = load_part(spec, Part.EXTRACTOR, _extractor(case))
    features = extract_features(extractor, chosen.images, spec).flatten(1)
    network = load_part(spec, Part.GENERATOR, case.view.update[Part.GENERATOR]).eval()
    optimiser = torch.optim.Adam([one.requires_grad_() for one in network.parameters()], _RATE)
    for _ in range(_STEPS):
        rows = torch.randint(len(chosen), (_BATCH,), generator=stream)
        noise = torch.randn(_BATCH, spec.network.noise_dim, generator=stream)
        loss = (network(noise, chosen.labels[rows]).flatten(1) - features[rows]).square().mean()
        if float(loss.detach()) <= (error * float(features.std())) ** 2:
            break
        descend(optimiser, loss)
    return _sending(case, Part.GENERATOR, weights_of(network))


def overfit(case: Case, epochs: float, stream: torch.Generator) -> Case:
    """A classifier that was trained with the extractor for more epochs on the training images."""
    if not epochs:
        return case
    assert case.truth.after is not None
    start = {**case.view.before.parts, **case.truth.after, **case.view.update}
    parts = networks.trained_alone(case.view, start, case.truth.train, case.streams.at("overfit"), int(epochs))
    private = {**case.truth.after, Part.EXTRACTOR: parts[Part.EXTRACTOR]}
    case = replace(case, truth=replace(case.truth, after=private))
    return _sending(case, Part.CLASSIFIER, parts[Part.CLASSIFIER])


def faded(case: Case, share: float, stream: torch.Generator) -> Case:
    """A classifier between the mean of the other clients' and the client's own, which reveals its class shares."""
    mean, own = mean_parts(list(case.view.others.values()))[Part.CLASSIFIER], case.view.update[Part.CLASSIFIER]
    return _sending(case, Part.CLASSIFIER, {name: torch.lerp(mean[name], one, share) for name, one in own.items()})


class Plant(Value):
    """A kind of leak.

    Attributes:
        strengths: from weak to strong.
        attacks: those that it can touch, each with the figure whose smallest leak its strengths measure, or "".
    """

    put: Put
    strengths: tuple[float, ...]
    attacks: Mapping[str, str]


PLANTS: Mapping[str, Plant] = {
    "low bits": Plant(low_bits, (0.01, 1.0), {}),
    "image in columns": Plant(image_in_columns, (0.5, 0.2, 0.0), {"memorisation": ""}),
    "scaled rows": Plant(scaled_rows, (0.5, 0.2, 0.0), {}),
    "coded rows": Plant(coded_rows, (2, 3, 8), {}),
    "memorised features": Plant(memorised_features, (0.5, 0.2, 0.05), {"memorisation": "memory_worst"}),
    "class counts": Plant(class_counts, (0, 1e-4, 0.1), {"labels": ""}),
    "faded classifier": Plant(faded, (0, 0.02, 0.1, 0.5), {"labels": "label_l1"}),
    "overfit classifier": Plant(overfit, (0, 20, 60, 200), {"membership": "mia_auc", "reidentification": "reid"}),
}
