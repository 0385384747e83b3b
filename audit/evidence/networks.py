"""The networks of an attacker: twice differentiable, with an estimate instead of the private extractor."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from audit.evidence.case import Extractor, View
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ClientState, Cohort, RoundContext, TrainingParams, Weights
from fedcg.learning.networks import build_part, load_part, weights_of
from fedcg.learning.networks.fast_layers import AveragedConv2d, MaxedConv2d
from fedcg.learning.networks.plans import shadow_spec
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationSpec, InputForm, ParameterValue
from fedcg.learning.training.batches import Augmenter, image_tensors, local_batches
from fedcg.learning.training.losses import cross_entropy
from fedcg.learning.training.optimisers import adam
from fedcg.learning.training.stage import Descent, Descents, Nets, Stage, Tensors, Trained, run_stage
from fedcg.values import Value
from fedcg.wire.parts import Part, Report

_POOLS: Mapping[type[nn.Module], Callable[[], nn.Module]] = {
    AveragedConv2d: lambda: nn.AvgPool2d(2),
    MaxedConv2d: lambda: nn.MaxPool2d(2),
}
_SURROGATE_LR = 1e-3
_SURROGATE_BATCH = 32
_MATCH = 3.0  # weight of the features' misfit beside the cross-entropy; 0.3 to 3 gain alike (digits, other clients than reported)
_STEEP_RATE = 0.1


def with_lenet5(spec: FederationSpec) -> FederationSpec:
    """Return the spec with FedCG's LeNet5 (sigmoids) from random weights instead of its split, for positive controls."""
    plain = {"split": "lenet5", "weights": None, "freeze": "none", "backbones": ()}
    return spec.model_copy(update={"network": spec.network.model_copy(update=plain)})


class WholeModel(Value):
    """Extractor and classifier for an attack: pixels in, logits out, differentiable any number of times; eval mode.

    Attributes:
        form: the spec's input form. Pixels are [N, C, H, W] float32 in [0, 1], or tensors from `unit_pixels`; the model
            normalises them.
    """

    extractor: nn.Module
    classifier: nn.Module
    form: InputForm

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] in [0, 1] -> [N, *feature_shape]."""
        features: torch.Tensor = self.extractor(normalise(pixels, self.form))
        return features

    def logits(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, C, H, W] in [0, 1] -> [N, classes]."""
        logits: torch.Tensor = self.classifier(self.features(pixels))
        return logits


def twice_differentiable(module: nn.Module) -> nn.Module:
    """Replace our pooled convolutions, which only have first-order gradients, with equivalent torch layers, in place. The order of the parameters is unchanged."""
    for name, child in module.named_children():
        pool = _POOLS.get(type(child))
        if pool is None:
            twice_differentiable(child)
            continue
        assert isinstance(child, nn.Conv2d)
        with torch.device("meta"):  # which draws nothing from the global random state
            plain = nn.Conv2d(child.in_channels, child.out_channels, child.kernel_size)  # type: ignore[arg-type]
        plain.load_state_dict(child.state_dict(), assign=True)
        setattr(module, name, nn.Sequential(plain, pool()))
    return module


WHOLE = (Part.EXTRACTOR, Part.CLASSIFIER)


def whole_model(spec: FederationSpec, parts: Mapping[Part, Weights]) -> WholeModel:
    """Return a model with the weights of these parts; only those of `WHOLE` are used."""
    with lent_generators(0):  # torch's layers draw weights when they are created
        nets = [twice_differentiable(load_part(spec, part, parts[part])).eval() for part in WHOLE]
    return WholeModel(nets[0], nets[1], spec.input)


def estimated_extractor(
    view: View,
    source: Extractor,
    classifier: Weights,
    streams: Streams,
    epochs: int = 20,
    features: ImageSet | None = None,
) -> Weights:
    """Return an attacker's extractor.

    Args:
        view: of the attacker.
        source: its origin. `SURROGATE` is trained on the auxiliary images to fit the frozen classifier (from the public
            start, which is never worse than a random one).
        classifier: the classifier that the surrogate must fit.
        streams: for random weights and the order of images.
        epochs: for training a surrogate.
        features: features [N, *feature_shape] that the true extractor could give, with labels: a surrogate also fits
            the mean of each class.

    Raises:
        ValueError: the view lacks what the source needs.
    """
    if source is Extractor.SENT:
        return view.update[Part.EXTRACTOR]
    if source is Extractor.TRUE:
        return view.private[Part.EXTRACTOR]
    if source is Extractor.RANDOM:
        return weights_of(build_part(view.spec, Part.EXTRACTOR, streams.generator("extractor", 0)))
    if source is Extractor.START:
        return view.start()[Part.EXTRACTOR]
    if source is Extractor.COLLUDER:
        if view.colluder is None:
            raise ValueError("no device of the cohort helps this attacker")
        return view.colluder.extractor
    if view.auxiliary is None:
        raise ValueError("a surrogate extractor needs auxiliary images, and none were given")
    return _surrogate(view, view.auxiliary, classifier, streams, epochs, features)


def assembled(
    view: View, source: Extractor, streams: Streams, epochs: int = 20, features: ImageSet | None = None
) -> WholeModel:
    """Return the classifier of an update behind an extractor from a source; arguments as for `estimated_extractor`."""
    classifier = view.update[Part.CLASSIFIER]
    extractor = estimated_extractor(view, source, classifier, streams, epochs, features)
    return whole_model(view.spec, {Part.EXTRACTOR: extractor, Part.CLASSIFIER: classifier})


def _surrogate(
    view: View, images: ImageSet, classifier: Weights, streams: Streams, epochs: int, features: ImageSet | None
) -> Weights:
    spec, extractor = view.spec, load_part(view.spec, Part.EXTRACTOR, view.start()[Part.EXTRACTOR])
    ctx = RoundContext(spec, 1, 1, streams.at("surrogate"))
    params = TrainingParams(epochs=epochs, batch_size=_SURROGATE_BATCH)
    of_images = image_tensors(images, spec, Augmenter(spec, ctx.streams))

    misfit = None if features is None else _class_mean_misfit(features)

    def step(nets: Nets, batch: Tensors) -> Descents:
        shown, labels = batch
        made = nets[Part.EXTRACTOR](shown)
        loss = cross_entropy(nets[Part.CLASSIFIER](made), labels)
        loss = loss if misfit is None else loss + _MATCH * misfit(made, labels)
        yield Descent(Part.EXTRACTOR, lambda: loss)
        return (loss,)

    networks = {"extractor": extractor, "classifier": load_part(spec, Part.CLASSIFIER, classifier)}
    optimiser = adam(extractor.parameters(), _SURROGATE_LR, 0.0)
    trained = {"extractor": Trained(("extractor",), optimiser)}
    batches = local_batches("classify", len(images), params, ctx, of_images)
    run_stage(Stage("classify", ("surrogate",), networks, trained, batches, step), ctx)
    return weights_of(extractor)


def _class_mean_misfit(known: ImageSet) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the squared distance of features [N, ...] from the mean known feature of their labels, relative to the variance of the means."""
    rows, flat = torch.nn.functional.one_hot(known.labels, len(known.classes)).float(), known.images.flatten(1)
    counts = rows.sum(0)
    means = rows.T @ flat / counts.clamp(min=1).unsqueeze(1)
    scale, weights = means[counts > 0].var(), (counts > 0).float().unsqueeze(1)
    return lambda features, labels: (weights[labels] * (features.flatten(1) - means[labels])).square().mean() / scale


def plain_params(params: Mapping[str, ParameterValue]) -> dict[str, ParameterValue]:
    """Return training parameters for the attacker's networks: a rate that only suits DP-SGD's clipped gradients becomes Adam's usual one."""
    rate = params.get("lr")
    is_steep = params.get("optimiser") == "sgd" and isinstance(rate, float | int) and rate > _STEEP_RATE
    return {**params, "optimiser": "adam", "lr": _SURROGATE_LR} if is_steep else dict(params)


def trained_alone(
    view: View, start: Mapping[Part, Weights], images: ImageSet, streams: Streams, epochs: int
) -> dict[Part, Weights]:
    """Train extractor and classifier on images as a device trains alone: for shadow and reference models, and overfitted controls."""
    spec = _of_epochs(shadow_spec(view.spec), epochs)
    state = ClientState({part: start[part] for part in (Part.EXTRACTOR, Part.CLASSIFIER)})
    ctx = RoundContext(spec, view.round, 1, streams)
    return dict(get_method("local").local_round(state, images, None, ctx).private.parts)


def of_simulated_client(view: View, images: ImageSet, streams: Streams, epochs: int) -> View:
    """Simulate a client with these images: return the view of its update by the federation's method, without mechanisms.

    The client starts from the view's aggregate, and its private parts from the public seed.
    """
    spec = _of_epochs(view.spec, epochs)
    state = view.method.init_client(spec, {**view.start(), **view.before.parts})
    # An attacker who simulates a client does not know the cohort's secret, and uses another one.
    ctx = RoundContext(spec, view.round, 1, streams, cohort=Cohort(streams))
    sent = view.method.local_round(state, images, view.before, ctx).shared.parts
    update = {part: sent[part] for part in view.update}
    return replace(view, spec=spec, update=update, report=Report(examples=len(images)))


def _of_epochs(spec: FederationSpec, epochs: int) -> FederationSpec:
    return spec.model_copy(update={"params": {**plain_params(spec.params), "epochs": epochs, "steps": 0}})
