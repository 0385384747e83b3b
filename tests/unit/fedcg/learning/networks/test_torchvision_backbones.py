"""torchvision's backbones as splits: cuts, shapes, initial weights, training, and the way over the wire."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import TrainingParams
from fedcg.learning.networks import FeatureRange, build_part, feature_shape, weights_of
from fedcg.learning.networks.assembly import allocated, skeleton, split_of
from fedcg.learning.networks.gan import DISCRIMINATORS, GENERATORS
from fedcg.learning.networks.image_networks import IMAGE_SPLITS
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from fedcg.learning.networks.splits import SPLITS
from fedcg.learning.networks.torchvision_backbones import backbone_split, vision
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm, NetworkChoice, ParameterValue
from fedcg.learning.split_names import BUILT_IN, CUTS, check_name
from fedcg.learning.training import batches
from fedcg.learning.training.batches import extract_features, images_at_once
from fedcg.learning.training.classification import classification
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context, same

EVERY_CUT = [f"{backbone}@{layer}" for backbone, cuts in CUTS.items() for layer in cuts.strides]
ROOT = Path(__file__).parents[5]
CLASSES = ("dark", "grey", "light")


def plan_for(
    split: str, side: int = 32, mode: str = "RGB", method: str = "fedcg", kind: str = "mlp", **params: ParameterValue
) -> FederationPlan:
    channels = {"L": 1, "RGB": 3}[mode]
    values = {"mode": mode, "height": side, "width": side, "mean": (0.5,) * channels, "std": (0.25,) * channels}
    return FederationPlan(
        federation="backbones",
        classes=CLASSES,
        input=ImageForm.model_validate(values),
        network=NetworkChoice(split=split, generator=kind, discriminator=kind, noise_dim=8),
        method=method,
        params=params,
        rounds=2,
    )


def images_of(spec: FederationPlan | FederationSpec, count: int) -> torch.Tensor:
    form = spec.image
    return torch.randn(count, form.channels, form.height, form.width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("split", "shape", "feature_range"),
    [
        ("resnet18", (128, 4, 4), FeatureRange.UNIT),
        ("resnet18@layer2", (128, 4, 4), FeatureRange.NON_NEGATIVE),
        ("resnet18@layer3.0", (256, 2, 2), FeatureRange.NON_NEGATIVE),
        ("resnet18@avgpool", (512, 1, 1), FeatureRange.NON_NEGATIVE),
        ("mobilenet_v3_small", (48, 2, 2), FeatureRange.UNIT),
        ("mobilenet_v3_small@features.3", (24, 4, 4), FeatureRange.UNIT),
    ],
)
def test_a_cut_has_its_layers_shape_and_range(split: str, shape: tuple[int, ...], feature_range: FeatureRange) -> None:
    spec = plan_for(split)
    assert feature_shape(spec) == shape
    assert split_of(spec).feature_range is feature_range


@pytest.mark.parametrize("backbone", CUTS)
def test_extractor_and_classifier_together_are_torchvisions_network(backbone: str) -> None:
    with lent_generators(3):
        whole: nn.Module = getattr(vision("models"), backbone)(weights=None, num_classes=len(CLASSES)).eval()
    spec = plan_for(f"{backbone}@avgpool" if backbone == "resnet18" else f"{backbone}@features.12")
    halves = [build_part(spec, part).eval() for part in (Part.EXTRACTOR, Part.CLASSIFIER)]
    # a cut keeps the order of layers, so names may differ and tensors line up
    tensors = iter(whole.state_dict().values())
    for half in halves:
        half.load_state_dict({name: next(tensors) for name in half.state_dict()})
    assert next(tensors, None) is None
    images = images_of(spec, 2)
    with torch.no_grad():
        features = halves[0](images)
        if "sigmoid" in dict(halves[0].named_children()):
            features = torch.logit(features, eps=1e-12)
        assert torch.allclose(halves[1](features), whole(images), atol=1e-4)


@pytest.mark.parametrize(
    "name",
    [f"resnet18@{layer}" for layer in ("relu", "maxpool", "layer2.0", "layer4", "avgpool")]
    + [f"mobilenet_v3_small@{layer}" for layer in ("features.0", "features.8", "features.12", "avgpool")],
)
def test_a_cut_trains_on_two_of_its_smallest_images_and_keeps_its_range(name: str) -> None:
    backbone, _, layer = name.partition("@")
    spec = plan_for(name, max(4, CUTS[backbone].smallest_side(layer)))
    extractor, classifier = (build_part(spec, part).train() for part in (Part.EXTRACTOR, Part.CLASSIFIER))
    with lent_generators(0):
        features = extractor(images_of(spec, 2))
        logits = classifier(features)
    assert logits.shape == (2, len(CLASSES))
    assert torch.isfinite(logits).all()
    assert features.min().item() >= 0.0
    assert features.max().item() <= (1.0 if split_of(spec).feature_range is FeatureRange.UNIT else float("inf"))


@pytest.mark.parametrize("backbone", CUTS)
def test_strides_are_those_of_the_layers_and_a_smallest_image_leaves_two_positions_to_the_last_halving(
    backbone: str,
) -> None:
    cuts = CUTS[backbone]
    for layer, stride in cuts.strides.items():
        if layer != "avgpool":
            assert feature_shape(plan_for(f"{backbone}@{layer}", 64))[1:] == (64 // stride, 64 // stride)
    # five halvings; the fifth gets ceil(17 / 16) = 2 positions of a side of 17, one of a side of 16
    assert cuts.smallest_side("avgpool") == 17


@pytest.mark.parametrize("backbone", CUTS)
def test_running_averages_follow_the_data_within_a_round_of_thirty_steps(backbone: str) -> None:
    # 1 - 0.9 ** 30 = 0.958 of the mean that every step saw; torchvision's MobileNet has a momentum of 0.01.
    layers = build_part(plan_for(backbone, 16), Part.EXTRACTOR).modules()
    assert {layer.momentum for layer in layers if isinstance(layer, nn.BatchNorm2d)} == {0.1}


def test_a_wrong_layer_names_those_there_are_and_a_small_image_is_refused() -> None:
    with pytest.raises(NetworkError, match=r"after 'layer5'; it can after relu, maxpool, .*layer4\.0, layer4, avgpool"):
        complete_spec(plan_for("resnet18@layer5"))
    with pytest.raises(NetworkError, match=r"after 'features\.13'; it can after .*features\.12"):
        complete_spec(plan_for("mobilenet_v3_small@features.13"))
    with pytest.raises(NetworkError, match="needs images of at least 17x17, not 16x16"):
        complete_spec(plan_for("resnet18@layer4", 16))


def test_without_torchvision_the_error_says_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    backbone_split.cache_clear()
    for look in (lambda: check_name("resnet18@relu"), lambda: complete_spec(plan_for("resnet18@layer1.0"))):
        with pytest.raises(NetworkError, match=r"pip install 'fedcg-edge\[vision\]'"):
            look()
    complete_spec(plan_for("lenet5"))


def test_the_names_known_without_torch_are_the_splits_there_are() -> None:
    assert set(BUILT_IN) == set(SPLITS) | set(IMAGE_SPLITS)
    assert "torchvision" in sys.modules
    for name in (*BUILT_IN, *CUTS, *EVERY_CUT):
        check_name(name)


def test_building_lenet_imports_neither_torchvision_nor_torchs_compiler() -> None:
    code = (
        "import sys; from tests.unit.fedcg.learning.networks.test_torchvision_backbones import plan_for; from fedcg.learning.networks import NETWORKS, build_part; "
        "before = set(sys.modules); [build_part(plan_for('lenet5', kind='conv'), part) for part in NETWORKS]; new = set(sys.modules) - before; "
        "sys.exit(len(new) > 20 or 'torchvision' in sys.modules or 'sympy' in new)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=120).returncode == 0


def _each_network() -> list[tuple[FederationPlan, Part]]:
    halves = (Part.EXTRACTOR, Part.CLASSIFIER)
    splits = [(plan_for(name), part) for name in (*SPLITS, *CUTS, *IMAGE_SPLITS) for part in halves]
    splits += [(plan_for(name), Part.IMAGE_GENERATOR) for name in IMAGE_SPLITS]
    made = [
        (plan_for(split).model_copy(update={"network": NetworkChoice(split=split, **{part.value: kind})}), part)
        for split in ("lenet5", "resnet18@layer3")
        for part, kinds in ((Part.GENERATOR, GENERATORS), (Part.DISCRIMINATOR, DISCRIMINATORS))
        for kind in kinds
    ]
    return splits + made


def test_every_tensor_of_every_network_gets_its_first_value_from_the_seed() -> None:
    for spec, part in _each_network():
        drawn = []
        for _ in range(2):
            module = allocated(skeleton(spec, part), "cpu")
            with torch.no_grad():
                for tensor in (*module.parameters(), *module.buffers()):
                    tensor.fill_(float("nan") if tensor.is_floating_point() else -1)
            draw_weights(module, torch.Generator().manual_seed(4))
            drawn.append(weights_of(module))
            assert {id(buffer) for buffer in module.buffers()} <= {
                id(one) for one in module.state_dict(keep_vars=True).values()
            }
        for name, tensor in drawn[0].items():
            assert torch.isfinite(tensor).all(), (spec.network, part, name)
            assert tensor.is_floating_point() or (tensor >= 0).all(), (spec.network, part, name)
        assert same(*drawn)


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
    # 2048 * 32 * 32 / (224 * 224) = 41.8
    assert [images_at_once(plan_for("resnet18", side).image) for side in (16, 32, 64, 224)] == [2048, 2048, 512, 41]
    monkeypatch.setattr(batches, "BLOCK_ROWS", 4)
    spec = complete_spec(plan_for("lenet5", 64, "L"))
    data = ImageSet(torch.zeros(5, 1, 64, 64, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), CLASSES)
    seen: list[int] = []
    extractor = build_part(spec, Part.EXTRACTOR)
    extractor.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    assert len(extract_features(extractor, data.images, spec)) == 5
    assert seen == [1] * 5
    params = TrainingParams(steps=4, batch_size=2)
    stage = classification(extractor, build_part(spec, Part.CLASSIFIER), data, params, context(spec))
    assert [len(labels) for _, labels in stage.batches.blocks] == [2, 2, 2, 2]
