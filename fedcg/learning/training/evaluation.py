"""Evaluates models on the device with the data: accuracy, consistency, spread. Does not train."""

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from fedcg.learning.data.image_folder import normalise
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Evaluation, Parts, Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.networks.task import Held
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.batches import extract_features, generate, images_at_once
from fedcg.learning.training.task_round import task_evaluation
from fedcg.wire.parts import Part

_BATCH = 500
_SPREAD_DRAWS = 1000
# Geometric from 1 to 16. Between neighbours the mean loss changes by less than 0.001.
_TEMPERATURES = tuple(2.0 ** (step / 8) for step in range(33))
_LIVE = 1e-3  # dimensions with a real spread below this share of the class's mean spread are dead ReLUs


@torch.no_grad()
def evaluate(spec: FederationSpec, parts: Parts, data: ImageSet, device: str = "cpu") -> Evaluation:
    """Accuracy and mean cross-entropy of a personal model on held-out images.

    Raises:
        DataError: no images.
    """
    if isinstance(data, Held):
        return task_evaluation(spec, parts, data, device)
    logits, labels = logits_of(spec, parts, data, device), data.labels.cpu()
    correct = logits.argmax(1) == labels
    per_class = torch.bincount(labels[correct], minlength=len(data.classes))
    return Evaluation(
        accuracy=float(correct.double().mean()),
        loss=float(F.cross_entropy(logits, labels)),
        images=len(data),
        correct_per_class=tuple(int(count) for count in per_class),
        images_per_class=data.label_counts(),
    )


@torch.no_grad()
def logits_of(spec: FederationSpec, parts: Parts, data: ImageSet, device: str = "cpu") -> torch.Tensor:
    """Logits of a personal model (`personal_model`) on images, [N, C] on the CPU.

    Raises:
        DataError: no images.
    """
    if len(data) == 0:
        raise DataError("no images to evaluate on")
    model = personal_model(spec, parts, device)
    some = data.images.split(min(_BATCH, images_at_once(spec.input)))
    return torch.cat([model(normalise(images.to(device), spec.input)).cpu() for images in some])


def loss_to_choose_by(spec: FederationSpec, parts: Parts, data: ImageSet, device: str = "cpu") -> float:
    """The loss by which a client selects a personal model: calibrated, or 1 minus a trainer's metric.

    Raises:
        DataError: no images.
    """
    if isinstance(data, Held):
        return task_evaluation(spec, parts, data, device).loss
    return calibrated_loss(logits_of(spec, parts, data, device), data.labels.cpu())


def calibrated_loss(logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Mean cross-entropy of softmax(logits / T) for the temperature T that minimises it.

    A model that was trained longer is more confident, and its plain cross-entropy is higher at equal accuracy. A
    separate temperature for each model removes this difference. T ranges from 1 to 16: below 1, a model that classifies
    a few validation images correctly would reach a loss of 0 and could not be compared.
    """
    return min(float(F.cross_entropy(logits.double() / temperature, labels)) for temperature in _TEMPERATURES)


@torch.no_grad()
def consistency(
    spec: FederationSpec, classifier: Weights, generator: Weights, streams: Streams, draws_per_class: int = 1000
) -> float:
    """Share of generated features that the client's classifier assigns to the intended class (cf. FedMD-CG fig. 5), in [0, 1]."""
    judge = load_part(spec, Part.CLASSIFIER, classifier).eval()
    source = load_part(spec, Part.GENERATOR, generator).eval()
    labels = torch.arange(spec.class_count).repeat_interleave(draws_per_class)
    noise = torch.randn(len(labels), spec.network.noise_dim, generator=streams.generator("consistency"))
    predicted = torch.cat([judge(some).argmax(1) for some in generate(source, noise, labels).split(_BATCH)])
    return float((predicted == labels).double().mean())


@torch.no_grad()
def generator_spread(
    spec: FederationSpec, extractor: Weights, generator: Weights, data: ImageSet, streams: Streams
) -> float:
    """Mean over classes and feature dimensions of std(G) / std(F): 1 means the spread of real features, 0 collapse.

    For each class with at least two images in `data`: the standard deviation of each dimension over 1,000 generated
        features, divided by that over the real ones. Dimensions without real spread are left out, as the ratio is
        meaningless there.

    Raises:
        DataError: no class has two images.
    """
    data = data.to("cpu")
    real = extract_features(load_part(spec, Part.EXTRACTOR, extractor), data.images, spec).flatten(1)
    source = load_part(spec, Part.GENERATOR, generator)
    stream = streams.generator("spread")
    ratios = []
    for label, count in enumerate(data.label_counts()):
        noise = torch.randn(_SPREAD_DRAWS, spec.network.noise_dim, generator=stream)
        if count < 2:
            continue
        truth = real[data.labels == label].std(dim=0)
        made = generate(source, noise, torch.full((_SPREAD_DRAWS,), label)).flatten(1).std(dim=0)
        live = truth > _LIVE * truth.mean()
        if bool(live.any()):
            ratios.append((made[live] / truth[live]).mean())
    if not ratios:
        raise DataError("no class has two images with different features: the generator's spread cannot be measured")
    return float(torch.stack(ratios).mean())


def generator_figures(
    spec: FederationSpec, parts: Parts, images: ImageSet, streams: Streams
) -> dict[str, float | None]:
    """Consistency and spread of a client's own generator; empty for a method without one."""
    if Part.GENERATOR not in parts:
        return {}
    agreed = consistency(spec, parts[Part.CLASSIFIER], parts[Part.GENERATOR], streams)
    try:
        spread = generator_spread(spec, parts[Part.EXTRACTOR], parts[Part.GENERATOR], images, streams)
    except DataError:
        return {"consistency": agreed, "spread": None}
    return {"consistency": agreed, "spread": spread}


def is_preferred(
    accuracy: float | None, loss: float | None, other_accuracy: float | None, other_loss: float | None
) -> bool:
    """Whether a newer model replaces the best one so far: higher validation accuracy, lower validation loss between equals.

    With equal accuracy and loss the older one stays. Without validation images (None) the newer one is preferred.

    Args:
        accuracy: of the newer model on the validation images, in [0, 1].
        loss: its mean cross-entropy there.
        other_accuracy: of the best model so far.
        other_loss: its mean cross-entropy.
    """
    if accuracy is None or other_accuracy is None:
        return True
    return (accuracy, -(loss or 0.0)) > (other_accuracy, -(other_loss or 0.0))
