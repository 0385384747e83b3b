"""A network of timm's with 0.1 million random weights in a file, in the place of a pretrained one."""

from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.networks.timm_backbones import timm_library
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice, ParameterValue
from fedcg.learning.split_names import weights_digest

TIMM = "test_efficientnet"
SPLIT = f"timm:{TIMM}+project:16"
IMAGENET = ImageForm(mode="RGB", height=64, width=64, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
CLASSES = ("dark", "grey", "light")


def tiny_network() -> nn.Module:
    """The network, with ImageNet's classes, the same at every call; its running statistics are those of random images."""
    with lent_generators(3), torch.no_grad():
        network: nn.Module = timm_library().create_model(TIMM, pretrained=False)
        for _ in range(20):
            network.train()(torch.randn(8, 3, 64, 64))
    return network.eval()


def write_tiny_weights(folder: Path) -> Path:
    """The network's weights as a file that `--weights FOLDER` finds."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{TIMM}.safetensors"
    safetensors.torch.save_file(tiny_network().state_dict(), path)
    return path


def tiny_plan(
    method: str, weights: Path | None, freeze: str = "all", split: str = SPLIT, **params: ParameterValue
) -> FederationPlan:
    """A plan of a quick federation on it."""
    pinned = None if weights is None else weights_digest(weights)
    network = NetworkChoice(split=split, weights=pinned, freeze=freeze, noise_dim=8)
    return FederationPlan(
        federation="tiny",
        classes=CLASSES,
        image=IMAGENET,
        network=network,
        method=method,
        params={"epochs": 1, "batch_size": 8, **params},
        rounds=2,
    )
