"""Shapes, published sizes and initial weights of every network."""

import math

import pytest
import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.networks import (
    NETWORKS,
    build,
    build_part,
    feature_shape,
    layout_of,
    layouts,
    load_part,
    weights_of,
)
from fedcg.learning.networks.fast_layers import SpectralConv2d, SpectralLinear
from fedcg.learning.networks.gan import GENERATORS, ClassGaussians, spread_growth
from fedcg.learning.networks.plans import complete_spec, initial_parts, shadow_spec
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.parts import Part, ReportField
from tests.support.learning.learning_cases import CLASSES, GREY, plan, quick_spec, same

CIFAR = ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
TEN = tuple("abcdefghij")
KINDS = sorted(GENERATORS)
DISCRIMINATOR_FOR = {"conv": "conv", "conv_small": "conv_published"}


def cifar(**network: object) -> FederationPlan:
    return FederationPlan(
        federation="cifar",
        classes=TEN,
        image=CIFAR,
        network=NetworkChoice.model_validate(network),
        method="fedcg",
        rounds=1,
    )


def parameter_bytes(spec: FederationPlan, part: Part) -> int:
    return sum(4 * parameter.numel() for parameter in build_part(spec, part).parameters())


def test_lenet_has_the_published_sizes() -> None:
    for split in ("lenet5", "lenet5_relu"):
        assert parameter_bytes(cifar(split=split), Part.EXTRACTOR) == 11_488
        assert parameter_bytes(cifar(split=split), Part.CLASSIFIER) == 236_536
        assert feature_shape(cifar(split=split)) == (16, 5, 5)


def test_the_wide_lenet_has_twice_the_channels() -> None:
    # 3*12*25 + 12 and 12*32*25 + 32; linear layers from 32*5*5 numbers to 120, 84 and 10
    assert parameter_bytes(cifar(split="lenet5_wide"), Part.EXTRACTOR) == 4 * (912 + 9632)
    assert parameter_bytes(cifar(split="lenet5_wide"), Part.CLASSIFIER) == 4 * (96_120 + 10_164 + 850)
    assert feature_shape(cifar(split="lenet5_wide")) == (32, 5, 5)


def test_the_network_of_fedmd_cgs_authors_has_their_sizes() -> None:
    # convolutions 3*16*9 + 16 and 16*32*9 + 32, batch norm 2*(16 + 32); linear 128*128 + 128 and 128*10 + 10
    assert parameter_bytes(cifar(split="cnn_bn"), Part.EXTRACTOR) == 4 * (448 + 4640 + 96)
    assert parameter_bytes(cifar(split="cnn_bn"), Part.CLASSIFIER) == 4 * (16_512 + 1_290)
    assert feature_shape(cifar(split="cnn_bn")) == (32, 2, 2)


@pytest.mark.parametrize(
    ("kind", "with_100", "with_64"),
    [
        ("conv", 3_562_896, 3_267_984),
        ("conv_small", 399_504, 325_776),
        ("mlp3", 1_167_312, 1_093_584),
        ("mlp", 526_288, 489_424),
        ("mlp_small", 264_144, 245_712),
        ("gaussians", 32_000, 32_000),
    ],
)
def test_generators_have_the_published_sizes(kind: str, with_100: int, with_64: int) -> None:
    assert parameter_bytes(cifar(generator=kind, noise_dim=100), Part.GENERATOR) == with_100
    assert parameter_bytes(cifar(generator=kind, noise_dim=64), Part.GENERATOR) == with_64


def test_the_published_generator_grows_by_two_by_two_kernels() -> None:
    assert spread_growth(5, 4) == [2, 2, 2, 2]
    for size in range(1, 20):
        assert sum(kernel - 1 for kernel in spread_growth(size, 4)) == size - 1


@pytest.mark.parametrize("split", ["lenet5", "lenet5_relu", "lenet5_wide", "cnn_bn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("height", "width"), [(16, 16), (28, 28), (20, 36)])
def test_every_network_fits_every_feature_shape(split: str, kind: str, height: int, width: int) -> None:
    image = ImageForm(mode="L", height=height, width=width, mean=(0.5,), std=(0.5,))
    network = NetworkChoice(split=split, generator=kind, discriminator=DISCRIMINATOR_FOR.get(kind, "mlp"), noise_dim=7)
    nets = build(plan("fedcg", network, image))
    features = nets.extractor(torch.randn(4, 1, height, width))
    labels = torch.tensor([0, 1, 2, 0])
    made = nets.generator(torch.randn(4, 7), labels)
    assert made.shape == features.shape
    assert nets.classifier(features).shape == (4, len(CLASSES))
    assert nets.discriminator(features, labels).shape == (4,)


def test_class_gaussians_have_the_moments_of_the_features_they_were_fitted_to() -> None:
    generator = build_part(cifar(split="lenet5_relu", generator="gaussians", noise_dim=64), Part.GENERATOR)
    assert isinstance(generator, ClassGaussians)
    stream = torch.Generator().manual_seed(0)
    before = generator.mean.weight[9].clone()
    labels = torch.arange(2000) % 9  # nobody has the last class
    wanted = 5.0 + labels.view(-1, 1, 1, 1) + 0.5 * torch.randn(2000, 16, 5, 5, generator=stream)
    generator.fit(wanted, labels)
    made = generator(torch.randn(20_000, 64, generator=stream), torch.full((20_000,), 3))
    real = wanted[labels == 3]
    assert torch.allclose(made.mean(0), real.mean(0), atol=0.03)
    assert torch.allclose(made.std(0), real.std(0), rtol=0.1)
    # Features of a class vary apart from each other, as far as 64 numbers can make 400.
    assert torch.corrcoef(made.flatten(1).T).fill_diagonal_(0.0).abs().mean() < 0.15
    assert torch.equal(generator.mean.weight[9], before)


@pytest.mark.parametrize("kind", KINDS)
def test_generated_features_lie_in_the_range_of_the_extractors(kind: str) -> None:
    for split, upper in (("lenet5", 1.0), ("lenet5_relu", math.inf)):
        spec = cifar(split=split, generator=kind)
        made = build_part(spec, Part.GENERATOR)(torch.randn(64, 100), torch.arange(64) % 10)
        real = build_part(spec, Part.EXTRACTOR)(torch.randn(64, 3, 32, 32))
        for features in (made, real):
            assert 0.0 <= features.min().item() <= features.max().item() <= upper


@pytest.mark.parametrize("kind", KINDS)
def test_the_label_changes_what_a_generator_makes_and_a_discriminator_says(kind: str) -> None:
    nets = build(cifar(generator=kind, discriminator=DISCRIMINATOR_FOR.get(kind, "mlp")))
    noise, first, second = torch.randn(8, 100), torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    assert not torch.allclose(nets.generator(noise, first), nets.generator(noise, second))
    features = torch.rand(8, 16, 5, 5)
    assert not torch.allclose(nets.discriminator(features, first), nets.discriminator(features, second))


def test_an_image_too_small_for_the_split_and_an_unknown_name_are_explained() -> None:
    small = GREY.model_copy(update={"height": 8, "width": 8})
    with pytest.raises(NetworkError, match="at least 16x16, not 8x8"):
        complete_spec(plan("fedcg", image=small))
    with pytest.raises(NetworkError, match="no split named 'lenet9'; there are lenet5"):
        complete_spec(plan("fedcg", NetworkChoice(split="lenet9")))
    with pytest.raises(NetworkError, match="no generator named 'gru'"):
        complete_spec(plan("fedcg", NetworkChoice(generator="gru")))


def test_spectral_layers_equal_torchs_parametrisation_in_value_and_gradient() -> None:
    from torch.nn.utils.parametrizations import spectral_norm

    torch.manual_seed(0)
    pairs: list[tuple[nn.Module, nn.Module, torch.Tensor]] = [
        (SpectralLinear(6, 5), spectral_norm(nn.Linear(6, 5)), torch.randn(3, 6)),
        (SpectralConv2d(2, 3, (2, 2)), spectral_norm(nn.Conv2d(2, 3, 2)), torch.randn(3, 2, 4, 4)),
    ]
    for ours, theirs, inputs in pairs:
        state = theirs.state_dict()
        values = {"weight": state["parametrizations.weight.original"], "bias": state["bias"]}
        values |= {
            f"vectors.{new}": state[f"parametrizations.weight.0.{old}"]
            for new, old in (("left", "_u"), ("right", "_v"))
        }
        ours.load_state_dict(values)
        for mode in (True, True, False):
            ours.train(mode)
            theirs.train(mode)
            expected = theirs(inputs)
            assert torch.allclose(ours(inputs), expected, atol=1e-5)
        ours(inputs).square().sum().backward()
        theirs(inputs).square().sum().backward()
        wanted = dict(theirs.named_parameters())["parametrizations.weight.original"].grad
        got = dict(ours.named_parameters())["weight"].grad
        assert wanted is not None
        assert got is not None
        assert torch.allclose(got, wanted, rtol=1e-4, atol=1e-5)


def test_layouts_come_from_shapes_and_equal_those_of_real_weights() -> None:
    spec = quick_spec("fedcg")
    drawn = initial_parts(spec, b"cohort")
    assert spec.layouts == {part: layout_of(weights) for part, weights in drawn.items()}
    assert layouts(spec, frozenset(NETWORKS)) == spec.layouts
    names = {tensor.name: tensor.dtype for tensor in spec.layouts[Part.GENERATOR]}
    assert "int64" in names.values()


def test_shared_parts_start_from_the_public_seed_and_private_ones_from_the_cohort_secret() -> None:
    spec = quick_spec("fedcg")
    ours, theirs = initial_parts(spec, b"cohort"), initial_parts(spec, spec_root(spec.seed))
    for part in NETWORKS:
        assert same(ours[part], theirs[part]) == (part in {Part.CLASSIFIER, Part.GENERATOR})
        assert same(ours[part], initial_parts(spec, b"cohort")[part])
    other_seed = spec.model_copy(update={"seed": 6})
    assert not same(initial_parts(other_seed, b"cohort")[Part.GENERATOR], ours[Part.GENERATOR])


def test_initial_weights_have_torchs_default_bounds() -> None:
    weights = initial_parts(quick_spec("fedcg"), b"cohort")[Part.EXTRACTOR]
    first = weights["0.weight"]
    assert first.abs().max().item() <= 1 / math.sqrt(25)
    assert first.std().item() == pytest.approx(1 / math.sqrt(25) / math.sqrt(3), rel=0.1)


def test_loading_copies_and_refuses_weights_that_do_not_fit() -> None:
    spec = quick_spec("fedcg")
    weights = initial_parts(spec, b"cohort")[Part.CLASSIFIER]
    module = load_part(spec, Part.CLASSIFIER, weights)
    assert same(weights_of(module), weights)
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    assert not same(weights_of(module), weights)
    with pytest.raises(NetworkError, match="do not fit the classifier"):
        load_part(spec, Part.CLASSIFIER, {**weights, "extra": torch.zeros(1)})


def test_a_plan_becomes_a_spec_with_defaults_payload_and_needed_report_fields() -> None:
    spec = complete_spec(plan("fedmd_cg"))
    assert spec.params["lambda1"] == 1.0
    assert spec.params["epochs"] == 2
    assert spec.upload == (Part.CLASSIFIER, Part.GENERATOR)
    assert ReportField.LABEL_COUNTS in spec.required_report
    optional = complete_spec(plan("fedcg"))
    assert ReportField.LABEL_COUNTS in optional.report
    crossed = complete_spec(plan("fedcg").model_copy(update={"params": {"aggregation": "crossed_kd"}}))
    assert crossed.required_report == {ReportField.EXAMPLES, ReportField.LABEL_COUNTS}
    assert optional.required_report == complete_spec(plan("local")).required_report == {ReportField.EXAMPLES}
    assert ReportField.LABEL_COUNTS not in complete_spec(plan("fedavg")).report
    assert complete_spec(plan("local")).upload == ()
    assert FederationSpec.parse(spec.canonical()) == spec


def test_a_spec_without_crops_has_the_bytes_it_had_before_there_were_any() -> None:
    plain, cropped = (quick_spec("local", augment_crop=pixels) for pixels in (0, 2))
    assert b"augment_crop" not in plain.canonical()
    assert b'"augment_crop":2' in cropped.canonical()
    assert all(FederationSpec.parse(spec.canonical()) == spec for spec in (plain, cropped))
    with pytest.raises(ValueError, match="not in canonical form"):
        FederationSpec.parse(b'{"augment_crop":0,' + plain.canonical()[1:])


@pytest.mark.parametrize("pixels", [-1, 16, 65])
def test_crops_that_could_miss_an_image_are_refused_in_plan_and_spec(pixels: int) -> None:
    good = quick_spec("local", augment_crop=15)
    with pytest.raises(ValueError, match="augment_crop"):
        FederationSpec.model_validate({**good.model_dump(), "augment_crop": pixels})
    with pytest.raises(ValueError, match="augment_crop"):
        FederationPlan.model_validate({**plan("local").model_dump(), "augment_crop": pixels})


def test_every_unknown_parameter_is_named() -> None:
    with pytest.raises(ValueError, match=r"(?s)gama.*lerning"):
        complete_spec(plan("fedcg", gama=1, lerning=2))


def test_a_shadow_keeps_training_parameters_and_drops_the_methods_own() -> None:
    shadow = shadow_spec(quick_spec("fedcg", epochs=3))
    assert shadow.method == "local"
    assert shadow.params["epochs"] == 3
    assert "gan_lr" not in shadow.params
    assert set(shadow.layouts) == {Part.EXTRACTOR, Part.CLASSIFIER}


def test_streams_differ_by_purpose_and_repeat_from_their_start() -> None:
    streams = Streams(b"root").at("f", 1, 1)
    first = torch.rand(3, generator=streams.generator("noise"))
    assert torch.equal(first, torch.rand(3, generator=streams.generator("noise")))
    assert not torch.equal(first, torch.rand(3, generator=streams.generator("order")))
    assert not torch.equal(first, torch.rand(3, generator=Streams(b"root").at("f", 2, 1).generator("noise")))
