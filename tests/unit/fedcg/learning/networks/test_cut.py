"""Cutting a network of the user's own in two, and its classifier as data."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from fedcg.learning.errors import NetworkError
from fedcg.learning.networks.cut import split
from fedcg.learning.networks.layers import built, described
from fedcg.learning.networks.torchvision_import import vision
from fedcg.learning.spec import Layer
from tests.support.present import present


class Net(nn.Module):
    """Features of windows of 6 channels, and two linear layers; `way` flattens in one of the usual ways."""

    def __init__(self, way: Callable[[torch.Tensor], torch.Tensor] = lambda x: torch.flatten(x, 1)) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(6, 8, 5), nn.BatchNorm1d(8), nn.ReLU(), nn.AdaptiveAvgPool1d(4))
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, 3)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(self.way(self.features(x)))))
        return logits


WAYS = (
    lambda x: torch.flatten(x, 1),
    lambda x: x.flatten(1),
    lambda x: x.view(x.size(0), -1),
    lambda x: x.reshape(-1, 32),
)


@pytest.mark.parametrize("way", WAYS)
def test_the_halves_are_the_network_and_the_classifier_is_data(way: Callable[[torch.Tensor], torch.Tensor]) -> None:
    net, inputs = Net(way).eval(), torch.randn(5, 6, 50)
    halves = split(net, after="features")
    assert torch.equal(halves.classifier(halves.extractor(inputs)), net(inputs))
    layers = present(halves.layers())
    assert [layer.kind for layer in layers] == ["flatten", "linear", "relu", "linear"]
    again = built([Layer.model_validate_json(layer.model_dump_json()) for layer in layers])
    again.load_state_dict(dict(zip(again.state_dict(), halves.classifier.state_dict().values(), strict=True)))
    assert torch.equal(again(halves.extractor(inputs)), net(inputs))


def test_a_network_of_torchvisions_is_cut_behind_a_layer_and_its_classifier_is_no_data() -> None:
    net, images = vision("models").resnet18(num_classes=3).eval(), torch.randn(2, 3, 32, 32)
    halves = split(net, after="layer2")
    features = halves.extractor(images)
    assert features.shape == (2, 128, 4, 4)
    assert torch.equal(halves.classifier(features), net(images))
    assert halves.layers() is None


def test_every_standard_layer_is_described_and_built_alike() -> None:
    layers = nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.1)),
        nn.MaxPool2d(2), nn.Identity(), nn.Conv2d(8, 8, (1, 3)), nn.GroupNorm(2, 8), nn.SiLU(), nn.AvgPool2d(2, 1),
        nn.AdaptiveAvgPool2d((2, 1)), nn.Flatten(), nn.LayerNorm(16), nn.Dropout(0.2), nn.Linear(16, 4), nn.GELU(), nn.Tanh(),
    )  # fmt: skip
    found = present(described(layers))
    flat = [module for module in layers.modules() if type(module) not in {nn.Sequential, nn.Identity}]
    assert [repr(module) for module in built(found)] == [repr(module) for module in flat]


@pytest.mark.parametrize(
    "module",
    [nn.Conv2d(1, 1, 3, padding_mode="reflect"), nn.Conv2d(1, 1, 3, padding="same"), nn.GELU("tanh"), nn.LSTM(3, 3)],
)
def test_what_no_layer_of_a_spec_says_is_not_described(module: nn.Module) -> None:
    assert described(nn.Sequential(nn.ReLU(), module)) is None


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (Layer(kind="exec"), "layer 1, exec: unknown layer"),
        (Layer(kind="linear", args={"in_features": 3, "device": 1}), "no argument device"),
        (Layer(kind="linear", args={"in_features": 3}), "out_features"),
        (Layer(kind="linear", args={"in_features": 1 << 20, "out_features": 1 << 20}), "the limit is 67,108,864"),
    ],
)
def test_a_spec_can_ask_for_no_other_layer_and_for_no_more_memory(layer: Layer, words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        built([layer])


class _Skips(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.fc2(F.relu(self.fc1(self.features(x).view(x.size(0), -1))))
        return logits


class _Decides(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if x.sum() > 0 else -x)


class _Drops(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(F.dropout(x, 0.3, self.training))


@pytest.mark.parametrize(
    ("net", "after", "words"),
    [
        (_Drops().eval(), "features", "reads self.training .*nn.Dropout"),
        (Net(), "neck", "no submodule 'neck'; it has features, fc1, fc2"),
        (_Skips(), "features", "also uses x from before it"),
        (_Decides(), "features", r"can't be traced .*fedcg.Split\(extractor, classifier\)"),
        (nn.Bilinear(2, 2, 2), "", "no submodule ''"),
    ],
)
def test_a_network_that_cannot_be_cut_there_is_refused_with_the_reason(net: nn.Module, after: str, words: str) -> None:
    with pytest.raises(NetworkError, match=words):
        split(net, after)
