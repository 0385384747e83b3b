"""Networks and the specs that name them: published sizes, shapes, ranges, initial weights, and what a spec's bytes hold."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcg.learning import networks
from fedcg.learning.errors import NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext, TrainingParams, Update
from fedcg.learning.networks import image_networks
from fedcg.learning.networks.assembly import allocated, skeleton
from fedcg.learning.networks.gan import DISCRIMINATORS, GENERATORS, ClassGaussians
from fedcg.learning.networks.image_networks import IMAGE_SPLITS
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.networks.randomness import draw_weights
from fedcg.learning.networks.splits import SPLITS, FeatureRange
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice
from fedcg.learning.split_names import BUILT_IN, check_name
from fedcg.learning.training import batches, classification
from fedcg.learning.training.batches import extract_features, images_at_once
from fedcg.learning.training.stage import Stage
from fedcg.wire.parts import Part, ReportField, TensorLayout, UpdateCodec
from fedcg.wire.sealed_numbers import number_count
from tests.support.learning import learning_cases as cases
from tests.support.learning.networks import networks_of

CIFAR = ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
ROOT = Path(__file__).parents[5]
TEN = tuple("abcdefghij")
KINDS = sorted(GENERATORS)
DISCRIMINATOR_FOR = {"conv": "conv", "conv_small": "conv_published"}


def cifar(**network: object) -> FederationPlan:
    return FederationPlan(
        federation="cifar",
        classes=TEN,
        input=CIFAR,
        network=NetworkChoice.model_validate(network),
        method="fedcg",
        rounds=1,
    )


def parameter_bytes(spec: FederationPlan, part: Part) -> int:
    return sum(4 * parameter.numel() for parameter in networks.build_part(spec, part).parameters())


@pytest.mark.parametrize(
    ("split", "extractor", "classifier", "shape"),
    [
        ("lenet5", 11_488, 236_536, (16, 5, 5)),
        # 3*12*25 + 12 and 12*32*25 + 32; linear layers from 32*5*5 numbers to 120, 84 and 10
        ("lenet5_wide", 4 * (912 + 9632), 4 * (96_120 + 10_164 + 850), (32, 5, 5)),
        # convolutions 3*16*9 + 16 and 16*32*9 + 32, batch norm 2*(16 + 32); linear 128*128 + 128 and 128*10 + 10
        ("cnn_bn", 4 * (448 + 4640 + 96), 4 * (16_512 + 1_290), (32, 2, 2)),
    ],
)
def test_a_split_has_the_published_sizes(split: str, extractor: int, classifier: int, shape: tuple[int, ...]) -> None:
    assert parameter_bytes(cifar(split=split), Part.EXTRACTOR) == extractor
    assert parameter_bytes(cifar(split=split), Part.CLASSIFIER) == classifier
    assert networks.feature_shape(cifar(split=split)) == shape


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


@pytest.mark.parametrize("split", ["lenet5", "lenet5_relu", "lenet5_wide", "cnn_bn"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("height", "width"), [(16, 16), (28, 28), (20, 36)])
def test_every_network_fits_every_feature_shape(split: str, kind: str, height: int, width: int) -> None:
    image = ImageForm(mode="L", height=height, width=width, mean=(0.5,), std=(0.5,))
    network = NetworkChoice(split=split, generator=kind, discriminator=DISCRIMINATOR_FOR.get(kind, "mlp"), noise_dim=7)
    nets = {part: networks.build_part(cases.plan("fedcg", network, image), part) for part in networks.NETWORKS}
    features = nets[Part.EXTRACTOR](torch.randn(4, 1, height, width))
    labels = torch.tensor([0, 1, 2, 0])
    assert nets[Part.GENERATOR](torch.randn(4, 7), labels).shape == features.shape
    assert nets[Part.CLASSIFIER](features).shape == (4, len(cases.CLASSES))
    assert nets[Part.DISCRIMINATOR](features, labels).shape == (4,)


def test_class_gaussians_have_the_moments_of_the_features_they_were_fitted_to() -> None:
    generator = networks.build_part(cifar(split="lenet5_relu", generator="gaussians", noise_dim=64), Part.GENERATOR)
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
        made = networks.build_part(spec, Part.GENERATOR)(torch.randn(64, 100), torch.arange(64) % 10)
        for features in (made, networks.build_part(spec, Part.EXTRACTOR)(torch.randn(64, 3, 32, 32))):
            assert 0.0 <= features.min().item() <= features.max().item() <= upper


@pytest.mark.parametrize("kind", KINDS)
def test_the_label_changes_what_a_generator_makes_and_a_discriminator_says(kind: str) -> None:
    spec = cifar(generator=kind, discriminator=DISCRIMINATOR_FOR.get(kind, "mlp"))
    generator, discriminator = (networks.build_part(spec, part) for part in (Part.GENERATOR, Part.DISCRIMINATOR))
    noise, first, second = torch.randn(8, 100), torch.zeros(8, dtype=torch.int64), torch.ones(8, dtype=torch.int64)
    assert not torch.allclose(generator(noise, first), generator(noise, second))
    features = torch.rand(8, 16, 5, 5)
    assert not torch.allclose(discriminator(features, first), discriminator(features, second))


def test_layouts_come_from_shapes_and_equal_those_of_real_weights() -> None:
    spec = cases.quick_spec("fedcg")
    drawn = initial_parts(spec, b"cohort")
    assert spec.layouts == {part: networks.layout_of(weights) for part, weights in drawn.items()}
    assert networks.layouts(spec, frozenset(networks.NETWORKS)) == spec.layouts
    assert "int64" in {tensor.dtype for tensor in spec.layouts[Part.GENERATOR]}


def test_shared_parts_start_from_the_public_seed_and_private_ones_from_the_cohort_secret() -> None:
    spec = cases.quick_spec("fedcg")
    ours, theirs = initial_parts(spec, b"cohort"), initial_parts(spec, spec_root(spec.seed))
    for part in networks.NETWORKS:
        assert cases.same(ours[part], theirs[part]) == (part in {Part.CLASSIFIER, Part.GENERATOR})
        assert cases.same(ours[part], initial_parts(spec, b"cohort")[part])
    other_seed = spec.model_copy(update={"seed": 6})
    assert not cases.same(initial_parts(other_seed, b"cohort")[Part.GENERATOR], ours[Part.GENERATOR])


def test_loading_copies_and_refuses_weights_that_do_not_fit() -> None:
    spec = cases.quick_spec("fedcg")
    weights = initial_parts(spec, b"cohort")[Part.CLASSIFIER]
    module = networks.load_part(spec, Part.CLASSIFIER, weights)
    assert cases.same(networks.weights_of(module), weights)
    with torch.no_grad():
        next(module.parameters()).add_(1.0)
    assert not cases.same(networks.weights_of(module), weights)
    with pytest.raises(NetworkError, match="do not fit the classifier"):
        networks.load_part(spec, Part.CLASSIFIER, {**weights, "extra": torch.zeros(1)})


def test_a_plan_becomes_a_spec_with_defaults_payload_and_needed_report_fields() -> None:
    spec = complete_spec(cases.plan("fedmd_cg"))
    assert spec.params["lambda1"] == 1.0
    assert spec.params["epochs"] == 2
    assert spec.upload == (Part.CLASSIFIER, Part.GENERATOR)
    assert ReportField.LABEL_COUNTS in spec.required_report
    optional = complete_spec(cases.plan("fedcg"))
    assert ReportField.LABEL_COUNTS in optional.report
    crossed = complete_spec(cases.plan("fedcg").model_copy(update={"params": {"aggregation": "crossed_kd"}}))
    assert crossed.required_report == {ReportField.EXAMPLES, ReportField.LABEL_COUNTS}
    assert optional.required_report == complete_spec(cases.plan("local")).required_report == {ReportField.EXAMPLES}
    assert ReportField.LABEL_COUNTS not in complete_spec(cases.plan("fedavg")).report
    assert complete_spec(cases.plan("local")).upload == ()
    assert FederationSpec.parse(spec.canonical()) == spec


@pytest.mark.parametrize(
    ("method", "params", "sealed", "problem"),
    [
        ("fedper", {}, {Part.CLASSIFIER}, "fedper: sealed = classifier is not supported; it only averages: extractor"),
        ("fedgh", {}, {Part.CLASSIFIER}, "fedgh: sealed = classifier is not supported; it only averages: none"),
        ("fedavg", {"average": "median"}, {Part.EXTRACTOR}, "sealed parts support only the mean"),
    ],
)
def test_a_plan_seals_only_what_its_method_does_nothing_with_but_average(
    method: str, params: dict[str, str], sealed: set[Part], problem: str
) -> None:
    with pytest.raises(NetworkError, match=problem):
        complete_spec(cases.plan(method).model_copy(update={"params": params, "sealed": tuple(sealed)}))


def test_a_sealed_mean_has_room_for_the_variances_of_a_pretrained_batch_norm() -> None:
    spec = complete_spec(cases.plan("fedseal", NetworkChoice(split="cnn_bn"), CIFAR))
    start = initial_parts(spec, b"cohort")
    loud = {name: one + 566.0 * name.endswith("running_var") for name, one in start[Part.EXTRACTOR].items()}
    names = [name for name in loud if name.endswith("running_var")]
    merge = cases.aggregator_of(spec, cases.context(spec, 1))
    updates = {name: Update(name, {**start, Part.EXTRACTOR: loud}, 10) for name in "abc"}
    mean = cases.merged(merge, updates).parts[Part.EXTRACTOR]
    assert names
    assert all(torch.allclose(mean[name], loud[name], atol=1e-3) for name in names)


def test_a_sealed_plan_becomes_a_spec_with_numbers_for_what_is_sealed_and_public_counts_only_where_they_weigh() -> None:
    part, whole = (
        complete_spec(cases.plan("fedavg").model_copy(update={"sealed": sealed}))
        for sealed in ((Part.EXTRACTOR,), (Part.EXTRACTOR, Part.CLASSIFIER))
    )
    assert (part.upload, whole.upload) == ((Part.CLASSIFIER, Part.SEALED), (Part.SEALED,))
    assert (part.has_public_counts, whole.has_public_counts) == (True, False)
    assert (ReportField.EXAMPLES in part.report, ReportField.EXAMPLES in whole.report) == (True, False)
    numbers = {layout.name: layout.shape for layout in whole.layouts[Part.SEALED]}
    assert numbers == {part.value: (number_count(whole.layouts[part]),) for part in whole.sealed}
    assert FederationSpec.parse(whole.canonical()) == whole


def test_a_spec_that_alternates_has_statistics_alone_in_even_rounds_and_the_rest_in_odd_ones() -> None:
    spec = complete_spec(cases.plan("fedavg").model_copy(update={"sealed": (Part.EXTRACTOR,)}))
    means = TensorLayout(name="means", dtype="float32", shape=(3, 4), low=0.0, high=1.0)
    numbers = {layout.name: layout for layout in spec.layouts[Part.SEALED]}
    numbers["statistics"] = TensorLayout(name="statistics", dtype="uint32", shape=(13,))
    both = {**spec.layouts, Part.STATISTICS: (means,), Part.SEALED: tuple(numbers.values())}
    turns = spec.model_copy(update={"alternates": True, "sealed": (Part.EXTRACTOR, Part.STATISTICS), "layouts": both})
    classifier = {Part.CLASSIFIER: spec.layouts[Part.CLASSIFIER]}
    for odd, even in ((1, 2), (3, 4)):
        assert turns.update_layouts(odd) == {**classifier, Part.SEALED: (numbers["extractor"],)}
        assert turns.update_layouts(even) == {Part.SEALED: (numbers["statistics"],)}
    assert spec.update_layouts(1) == spec.update_layouts(2) == turns.update_layouts(1)
    clear = turns.model_copy(update={"sealed": (Part.EXTRACTOR,), "upload": (*spec.upload, Part.STATISTICS)})
    assert clear.update_layouts(1) == turns.update_layouts(1)
    assert clear.update_layouts(2) == {Part.STATISTICS: (means,)}


@pytest.mark.parametrize("pixels", [-1, 16, 65])
def test_crops_that_could_miss_an_image_are_refused_in_plan_and_spec(pixels: int) -> None:
    good = cases.quick_spec("local", augment_crop=15)
    with pytest.raises(ValueError, match="augment_crop"):
        FederationSpec.model_validate({**good.model_dump(), "augment_crop": pixels})
    with pytest.raises(ValueError, match="augment_crop"):
        FederationPlan.model_validate({**cases.plan("local").model_dump(), "augment_crop": pixels})


def test_streams_differ_by_purpose_and_repeat_from_their_start() -> None:
    streams = Streams(b"root").at("f", 1, 1)
    first = torch.rand(3, generator=streams.generator("noise"))
    assert torch.equal(first, torch.rand(3, generator=streams.generator("noise")))
    assert not torch.equal(first, torch.rand(3, generator=streams.generator("order")))
    assert not torch.equal(first, torch.rand(3, generator=Streams(b"root").at("f", 2, 1).generator("noise")))


def weights_in(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def test_the_paper_widths_have_the_published_sizes() -> None:
    paper = image_networks.WIDTHS["paper"]
    split = image_networks.image_split(paper)
    with torch.device("meta"):
        # Table 5: 4,704 + 18,432 + 73,728 + 6 * 294,912 + 73,728 + 18,432 + 4,704.
        assert weights_in(image_networks.image_generator(3, paper)) == 1_963_200
        assert weights_in(split.classifier((128, 8, 8), 10)) == 37_764_106
        assert weights_in(split.classifier((128, 7, 7), 10)) == 29_899_786
        extractor = split.extractor(3)
    # Convolutions 9 * (3*64 + 64*64 + 64*128 + 128*128) and 16 * (128*64 + 64*3), batch norms 2 * (64 + 64 + 128 + 128 + 64), 3 biases.
    assert weights_in(extractor) == 259_776 + 134_144 + 896 + 3


@pytest.mark.parametrize("width", sorted(image_networks.WIDTHS))
@pytest.mark.parametrize(("channels", "height", "wide"), [(1, 28, 28), (3, 32, 32), (1, 12, 16)])
def test_every_network_fits_its_neighbours(width: str, channels: int, height: int, wide: int) -> None:
    nets = networks_of(image_networks.WIDTHS[width], (channels, height, wide), classes=7)
    images = torch.rand(2, channels, height, wide, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        made, extractor = nets["generator"](images), nets["extractor"]
        assert isinstance(extractor, image_networks.ImageAutoencoder)
        features = extractor(made)
        restored = extractor.restore(features)
        assert nets["classifier"](features).shape == (2, 7)
        assert nets["discriminator"](made).shape == (2, 1, height // 4 - 2, wide // 4 - 2)
    assert made.shape == restored.shape == images.shape
    assert features.shape == (2, 2 * image_networks.WIDTHS[width].extractor, height // 4, wide // 4)
    for image in (made, restored):
        assert -1.0 <= image.min().item() < 0.0 < image.max().item() <= 1.0
    assert features.min().item() >= 0.0
    assert image_networks.image_split(image_networks.WIDTHS[width]).feature_range is FeatureRange.NON_NEGATIVE


def coded(method: str, codec: UpdateCodec) -> FederationSpec:
    return complete_spec(cases.usual_plan(method).model_copy(update={"codec": codec, "aggregate_codec": "f32"}))


def test_codecs_are_a_part_of_a_specs_name() -> None:
    digests = {coded("fedcg", codec).digest for codec in ("f32", "i8", "i8-delta")} | {cases.quick_spec("fedcg").digest}
    assert len(digests) == 4
    parsed = FederationSpec.parse(cases.quick_spec("fedcg").canonical())
    assert (parsed.codec, parsed.aggregate_codec) == ("i8-delta", "f16")
    assert parsed.with_base == (Part.CLASSIFIER, Part.GENERATOR)


def test_only_what_a_round_goes_on_from_is_taken_to_the_aggregate() -> None:
    bases = {name: set(coded(name, "i8-delta").with_base) for name in method_names()}
    assert bases["fedmd_cg"] == bases["fedgen"] == bases["fedsplit"] == {Part.CLASSIFIER}
    assert bases["fedavg"] == {Part.EXTRACTOR, Part.CLASSIFIER}
    assert bases["local"] == set()
    for name in method_names():
        assert bases[name] <= get_method(name).payload.up & get_method(name).payload.down
        assert coded(name, "i8").with_base == ()


def test_the_names_known_without_torch_are_the_splits_there_are() -> None:
    assert set(BUILT_IN) == set(SPLITS) | set(IMAGE_SPLITS)
    for name in BUILT_IN:
        check_name(name)


def test_building_lenet_imports_neither_torchvision_nor_torchs_compiler() -> None:
    code = (
        "import sys; from tests.unit.fedcg.learning.networks.test_networks import cifar; from fedcg.learning.networks import NETWORKS, build_part; "
        "before = set(sys.modules); [build_part(cifar(split='lenet5', generator='conv', discriminator='conv'), part) for part in NETWORKS]; "
        "new = set(sys.modules) - before; sys.exit(len(new) > 20 or 'torchvision' in sys.modules or 'sympy' in new)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


def _each_network() -> list[tuple[FederationPlan, Part]]:
    halves = (Part.EXTRACTOR, Part.CLASSIFIER)
    found = [(cifar(split=name), part) for name in (*SPLITS, *IMAGE_SPLITS) for part in halves]
    found += [(cifar(split=name), Part.IMAGE_GENERATOR) for name in IMAGE_SPLITS]
    found += [(cifar(generator=kind), Part.GENERATOR) for kind in GENERATORS]
    return found + [(cifar(discriminator=kind), Part.DISCRIMINATOR) for kind in DISCRIMINATORS]


def test_every_tensor_of_every_network_gets_its_first_value_from_the_seed() -> None:
    for spec, part in _each_network():
        drawn = []
        for _ in range(2):
            module = allocated(skeleton(spec, part), "cpu")
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            draw_weights(module, torch.Generator().manual_seed(4))
            drawn.append(networks.weights_of(module))
            assert {id(buffer) for buffer in module.buffers()} <= {
                id(one) for one in module.state_dict(keep_vars=True).values()
            }
        for name, tensor in drawn[0].items():
            assert torch.isfinite(tensor).all(), (spec.network, part, name)
            assert tensor.is_floating_point() or (tensor >= 0).all(), (spec.network, part, name)
        assert cases.same(*drawn)


def test_a_layer_fills_its_own_tensors_where_it_has_a_method_for_it_and_usual_layers_are_known() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.zeros(3))

        def reset(self, generator: torch.Generator) -> None:
            nn.init.uniform_(self.factor, 1.0, 2.0, generator=generator)

    layers = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(3), nn.InstanceNorm2d(2), nn.PReLU(), Scale())
    draw_weights(layers, torch.Generator().manual_seed(0))
    assert layers[-1].get_parameter("factor").min().item() >= 1.0


def test_large_images_are_prepared_and_extracted_in_blocks_of_the_memory_of_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def sized(side: int) -> FederationPlan:
        return cifar().model_copy(update={"input": CIFAR.model_copy(update={"height": side, "width": side})})

    # 2048 * 32 * 32 / (224 * 224) = 41.8
    assert [images_at_once(sized(side).image) for side in (16, 32, 64, 224)] == [2048, 2048, 512, 41]
    monkeypatch.setattr(batches, "BLOCK_ROWS", 4)
    spec = complete_spec(sized(64))
    data = ImageSet(torch.zeros(5, 3, 64, 64, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), TEN)
    seen: list[int] = []
    extractor = networks.build_part(spec, Part.EXTRACTOR)
    extractor.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    assert len(extract_features(extractor, data.images, spec)) == 5
    assert seen == [1] * 5
    params = TrainingParams(steps=4, batch_size=2)
    seen.clear()

    def blocks(stage: Stage, ctx: RoundContext) -> tuple[float]:
        seen.extend(len(labels) for _, labels in stage.batches.blocks)
        return (0.0,)

    monkeypatch.setattr(classification, "run_stage", blocks)
    classifier = networks.build_part(spec, Part.CLASSIFIER)
    classification.train_classifier(extractor, classifier, data, params, cases.context(spec))
    assert seen == [2, 2, 2, 2]
