"""Shadow models and the membership scores that use them. A score is computed only from a `View` and candidates.

Papers: Salem et al. 2019 (ML-Leaks), Ma et al. 2024 (PPIDSG), Zarifzadeh et al. 2024 (RMIA), Carlini et al. 2022 (LiRA).
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from scipy.special import logit
from scipy.stats import norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.neural_network import MLPClassifier

from audit.evidence import Extractor, View, WholeModel, networks
from audit.measures import Values, unit_pixels
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Weights
from fedcg.learning.seeds import Streams
from fedcg.values import Value
from fedcg.wire.parts import Part

_TOP = 3  # posteriors as inputs of ML-Leaks' attack network (Salem et al. 2019, section III)
_LEAKS_UNITS, PAIR_UNITS = 64, 128
_LEAKS_LR, PAIR_LR = 1e-2, 5e-3  # PPIDSG: Adam, 0.005; ML-Leaks gives none
_ATTACK_EPOCHS = 100
_BY_HEART = {"optimiser": "adam", "lr": 3e-3, "weight_decay": 0.0, "batch_size": 16}
_OFFLINE_SLOPE = 0.3  # a of RMIA's offline Pr(x), the paper's value for CIFAR-10
_BATCH = 512
_TINY = 1e-6


class Shadow(Value):
    """A model that the attacker trained in the way the client trains.

    Attributes:
        parts: extractor and classifier.
        images: the attacker's images.
        rows: rows of the images that it was trained on; `others`: the remaining rows.
    """

    parts: Mapping[Part, Weights]
    images: ImageSet
    rows: torch.Tensor
    others: torch.Tensor

    @property
    def seen(self) -> ImageSet:
        """The images that it was trained on."""
        return self.images.rows(self.rows)

    @property
    def unseen(self) -> ImageSet:
        """The images that it was not trained on."""
        return self.images.rows(self.others)


class Target(Value):
    """The inputs of a score.

    Attributes:
        victim: the client's model as reconstructed by the attacker.
        others: the mean of the other clients' models, reconstructed likewise; None without other updates.
        references: the shadow models, reconstructed likewise.
        shadows: the shadow models, in the order of `references`.
        population: images of the same kind that no model was trained on (z in RMIA).
    """

    victim: WholeModel
    others: WholeModel | None
    references: tuple[WholeModel, ...]
    shadows: tuple[Shadow, ...]
    population: ImageSet


Score = Callable[[Target, ImageSet, Streams], Values]
"""(target, candidates, streams) -> [N], higher for members."""


def train_shadows(
    view: View, images: ImageSet, count: int, epochs: int, streams: Streams, trained: Callable[[], None]
) -> tuple[Shadow, ...]:
    """Train shadow models, each on a random half of the images, as the client trains from the round's start.

    Private parts start from the public seed's weights, the only ones that the attacker has.

    Args:
        view: gives start and training parameters.
        images: auxiliary ones, at least 4.
        count: number of models.
        epochs: for each model.
        streams: for halves and orders.
        trained: called after each model.
    """
    start, found = {**view.start(), **view.before.parts}, []
    for number in range(count):
        order = torch.randperm(len(images), generator=streams.generator("half", number))
        rows, others = order.tensor_split(2)
        parts = networks.trained_alone(view, start, images.rows(rows), streams.at("shadow", number), epochs)
        found.append(Shadow(parts, images, rows, others))
        trained()
    return tuple(found)


def learnt_by_heart(view: View, images: ImageSet, epochs: int, streams: Streams) -> View:
    """Return the view of a round in which a client memorised a few images and sent the whole model: a positive control."""
    known = {**view.spec.params, **_BY_HEART}
    spec = view.spec.model_copy(update={"params": known, "augment_flip": False, "augment_crop": 0})
    start = {**view.start(), **view.before.parts}
    view = replace(view, spec=spec, others={}, before=replace(view.before, parts=start))
    return replace(view, update=networks.trained_alone(view, start, images, streams, epochs))


def target_of(
    view: View,
    source: Extractor,
    shadows: tuple[Shadow, ...],
    population: ImageSet,
    streams: Streams,
    step: Callable[[], None],
) -> Target:
    """Return the inputs of scores for an attacker with extractors from `source`.

    If the victim's own extractor is known (sent, or given for a ceiling), shadow models keep theirs. `step` is called
    after each reconstructed model.
    """
    streams = streams.at("surrogate")
    own = Extractor.SENT if source.is_own else source
    mean = mean_parts(list(view.others.values()))

    def together(update: Mapping[Part, Weights], extractor: Extractor) -> WholeModel:
        step()
        return networks.assembled(replace(view, update=update), extractor, streams)

    return Target(
        together(view.update, source),
        together(mean, source) if Part.CLASSIFIER in mean else None,
        tuple(together(one.parts, own) for one in shadows),
        shadows,
        population,
    )


def mean_parts(updates: Sequence[Mapping[Part, Weights]]) -> dict[Part, Weights]:
    """Return the unweighted mean of several updates, with the counters of the first; empty without updates."""
    first = updates[0] if updates else {}
    return {
        part: {
            name: torch.stack([one[part][name] for one in updates]).mean(0) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }
        for part, weights in first.items()
    }


@torch.no_grad()
def posteriors(model: WholeModel, images: ImageSet) -> Values:
    """Return the softmax of the logits of images, [N, classes]."""
    blocks = [model.logits(unit_pixels(some)).softmax(1) for some in images.images.split(_BATCH)]
    return torch.cat(blocks).double().numpy()


def confidence(model: WholeModel, images: ImageSet) -> Values:
    """Return the posterior of the images' labels, [N]."""
    found: Values = posteriors(model, images)[np.arange(len(images)), images.labels.numpy()]
    return found


def ml_leaks(target: Target, images: ImageSet, streams: Streams) -> Values:
    """ML-Leaks' adversary 1: a network of 64 units separates a shadow model's top 3 posteriors on training images from those on others."""

    def top(model: WholeModel, some: ImageSet) -> Values:
        return np.sort(posteriors(model, some), axis=1)[:, : -_TOP - 1 : -1]

    model, shadow = target.references[0], target.shadows[0]
    seen, unseen = top(model, shadow.seen), top(model, shadow.unseen)
    judge = separator(seen, unseen, _LEAKS_UNITS, _LEAKS_LR, streams.at("ml_leaks"))
    return judge(top(target.victim, images))


def two_shadows(target: Target, images: ImageSet, streams: Streams) -> Values:
    """PPIDSG's attack: from the outputs of the victim's model and of the others', a network infers whose image it is.

    As published (section 3), it trains on images that neither model was trained on, so it learns to separate the
    models, not the images: on a model that memorised 48 images its AUC was 0.41 (CIFAR-10). Here the first two shadow
    models replace both, on images that only one of the two was trained on, and the network receives both posteriors at
    once. The network is the published one (128 units; Adam 0.005; 100 epochs). For targets with `others`.
    """
    assert target.others is not None
    first, second = target.shadows[:2]
    rows = [mine.rows[~torch.isin(mine.rows, other.rows)] for mine, other in ((first, second), (second, first))]

    def seen_by(models: Sequence[WholeModel], some: ImageSet) -> Values:
        return np.hstack([_by_label(model, some) for model in models])

    members, others = (seen_by(target.references[:2], first.images.rows(some)) for some in rows)
    judge = separator(members, others, PAIR_UNITS, PAIR_LR, streams.at("two_shadows"))
    return judge(seen_by((target.victim, target.others), images))


def _by_label(model: WholeModel, images: ImageSet) -> Values:
    """Return posteriors [N, classes]: that of the image's label, then the others from largest to smallest."""
    found, label = posteriors(model, images), np.arange(len(images.classes)) == images.labels.numpy()[:, None]
    rest = np.sort(np.where(label, -1.0, found))[:, :0:-1]
    return np.hstack([found[label][:, None], rest])


def separator(members: Values, others: Values, units: int, lr: float, streams: Streams) -> Callable[[Values], Values]:
    """Train a network of one hidden layer to separate rows [N, D] from rows [M, D]; it returns the probability of the first."""
    network = MLPClassifier(
        (units,),
        learning_rate_init=lr,
        max_iter=_ATTACK_EPOCHS,
        n_iter_no_change=_ATTACK_EPOCHS,
        random_state=streams.seed("network") % 2**32,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the papers give the number of epochs
        network.fit(np.vstack([members, others]), np.repeat([1, 0], [len(members), len(others)]))

    def probability(some: Values) -> Values:
        found: Values = network.predict_proba(some)[:, 1]
        return found

    return probability


def log_ratio(target: Target, images: ImageSet, streams: Streams) -> Values:
    """Return RMIA's log Pr(x | θ) / Pr(x), [N], with Pr(x) from reference models that were not trained on x (offline).

    Pr(x) = ((1 + a) · mean of the references' confidences + 1 - a) / 2.
    """
    unseen = np.mean([confidence(model, images) for model in target.references], axis=0)
    expected = ((1 + _OFFLINE_SLOPE) * unseen + 1 - _OFFLINE_SLOPE) / 2
    ratio: Values = np.log(np.maximum(confidence(target.victim, images), _TINY) / expected)
    return ratio


def rmia(target: Target, images: ImageSet, streams: Streams) -> Values:
    """RMIA at γ = 1: share of the population z with LR(x, z) = ratio(x) / ratio(z) >= γ.

    With one population for all x the share is a non-decreasing function of ratio(x); ties are put in the order of the ratio.
    """
    ratios, population = log_ratio(target, images, streams), np.sort(log_ratio(target, target.population, streams))
    share = np.searchsorted(population, ratios, side="right")
    return (share + 1 / (1 + np.exp(-ratios))) / (len(population) + 1)


def rmia_by_others(target: Target, images: ImageSet, streams: Streams) -> Values:
    """RMIA with the other clients' mean model as its reference, which is required: as well trained as the victim's, on other images."""
    assert target.others is not None
    return rmia(replace(target, references=(target.others,)), images, streams)


def lira_offline(target: Target, images: ImageSet, streams: Streams) -> Values:
    """LiRA's offline test: 1 - Pr(Z > φ) with Z normal, moments of φ = log p / (1 - p) over each image's reference models."""
    known = (np.clip(confidence(model, images), _TINY, 1 - _TINY) for model in (target.victim, *target.references))
    victim, *references = map(logit, known)
    found: Values = norm.logcdf(victim, np.mean(references, axis=0), np.std(references, axis=0) + _TINY)
    return found
