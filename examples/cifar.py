"""Ten sites federate a small convolutional network on CIFAR-10 by FedAvg: three rounds of one local epoch.

It shows how much code a first federation needs (docs/comparison.md). torchvision downloads the data, unless
python examples/cifar.py FOLDER names a folder with train/CLASS/*.jpg and test/CLASS/*.jpg. 2 minutes on two CPUs.
"""

import sys
from pathlib import Path

import torch
from PIL import Image
from torch import nn

import fedcg

SITES = [f"site-{number}" for number in range(1, 11)]
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def network() -> nn.Module:
    convolutions = nn.Sequential(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU())
    linear = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))
    return nn.Sequential(convolutions, nn.MaxPool2d(2), nn.Flatten(), *linear)


def samples(site: str, part: str, folder: str) -> list[tuple[Image.Image, int]]:
    if folder:
        files = sorted(Path(folder, part).glob("*/*"))[SITES.index(site) :: len(SITES)]
        return [(Image.open(file).convert("RGB"), CLASSES.index(file.parent.name)) for file in files]
    from torchvision.datasets import CIFAR10

    data = CIFAR10("data", train=part == "train", download=True)
    return [data[row] for row in range(SITES.index(site), len(data), len(SITES))]


def client(site: str, folder: str = "") -> fedcg.Client:
    model, half = fedcg.split(network(), after="0"), [0.5] * 3
    train, test = (samples(site, part, folder) for part in ("train", "test"))
    return fedcg.Client(model, train, CLASSES, test=test, mean=half, std=half)


if __name__ == "__main__":
    torch.manual_seed(0)
    clients = {site: client(site, *sys.argv[1:2]) for site in SITES}
    run = fedcg.simulate(clients, method="fedavg", rounds=3, local_epochs=1, lr=1e-3)
    print(run.table().round(1).to_string())
