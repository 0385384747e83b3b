"""The backbone of a device: by its owner, by its hardware, and the one that its private networks have."""

from dataclasses import replace

import pytest

from devices.profile import GIB, DeviceKind, DeviceProfile, Gpu, Trainable
from edge_client.store.own_backbone import choose_backbone, is_small
from fedcg.learning.spec import BackboneChoice, NetworkChoice

NETWORK = NetworkChoice(
    split="efficientnet_lite0+project:256",
    backbones=(BackboneChoice(name="mobilenetv3_small_100"), BackboneChoice(name="resnet18")),
)
SERVER = DeviceProfile(
    DeviceKind.CPU, None, None, "x86_64", 8, 16 * GIB, None, None, Trainable(possible=True, reason="")
)
ORIN = replace(SERVER, kind=DeviceKind.JETSON, gpu=Gpu("Orin", 8 * GIB, (8, 7), None, shares_memory=True))
NANO = replace(SERVER, kind=DeviceKind.JETSON, cpus=6, gpu=Gpu("Orin Nano", 4 * GIB, (8, 7), None, shares_memory=True))


@pytest.mark.parametrize(
    ("box", "small"),
    [
        (SERVER, False),
        (ORIN, False),
        (NANO, True),
        (replace(SERVER, cpus=2), True),
        (replace(SERVER, cpus=None), True),
        (replace(SERVER, trainable=Trainable(possible=False, reason="no memory")), True),
    ],
)
def test_a_small_box_is_one_with_few_cpus_or_memory_for_a_share_of_the_batch(
    box: DeviceProfile, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.store.own_backbone.torch_obstacle", lambda: "")
    assert is_small(box, "auto") is small


def test_a_gpu_that_torch_can_not_use_makes_no_box_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_client.store.own_backbone.torch_obstacle", lambda: "this torch has no CUDA")
    assert is_small(replace(ORIN, cpus=2), "auto")


def test_auto_takes_the_splits_own_and_on_a_small_box_the_one_with_the_least_work() -> None:
    assert choose_backbone(NETWORK, "auto", "", small=False) == "efficientnet_lite0"
    assert choose_backbone(NETWORK, "auto", "", small=True) == "mobilenetv3_small_100"
    assert choose_backbone(NETWORK, "resnet18", "", small=True) == "resnet18"
