"""Four wearers of a watch train a network that recognises standing, running, walking and badminton from six sensors.

The data is BasicMotions, 80 recordings of 6 x 100 numbers, in files of the package aeon. Its dependencies would install
an older numpy and are not needed here: pip install --no-deps aeon==1.6.0
It shows FedCG on signals: the convolutions stay with their wearer. For training, each wearer has one recording of two
activities and three of the others; for testing, two of each. It takes 15 seconds on two CPUs.
"""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedcg

SITES = ["site-1", "site-2", "site-3", "site-4"]
CLASSES = ["Standing", "Running", "Walking", "Badminton"]


def network() -> nn.Module:
    first, second = nn.Conv1d(6, 32, 5), nn.Conv1d(32, 32, 5)
    features = nn.Sequential(first, nn.ReLU(), nn.MaxPool1d(2), second, nn.ReLU(), nn.AdaptiveAvgPool1d(4))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 4))


def client(site: str) -> fedcg.Client:
    (x, y), number = recordings(), SITES.index(site)
    own = [np.flatnonzero(y == activity)[number::4] for activity in range(4)]  # five recordings of each
    train = np.concatenate([own[(number + k) % 4][:count] for k, count in enumerate((3, 3, 1, 1))])
    test = np.concatenate([recorded[3:] for recorded in own])
    model = fedcg.split(network(), after="0")
    return fedcg.Client(model, windows(x[train], y[train]), CLASSES, test=windows(x[test], y[test]))


def windows(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return windows of five seconds of each recording, one starting at each second."""
    return np.concatenate([x[:, :, start : start + 50] for start in range(0, 51, 10)]) / 5, np.tile(y, 6)


def recordings() -> tuple[np.ndarray, np.ndarray]:
    """Return all recordings, float32 [80, 6, 100], and their activities [80]."""
    found = importlib.util.find_spec("aeon")  # imports nothing
    if found is None or not found.submodule_search_locations:
        raise ModuleNotFoundError("the data is in the package aeon: pip install --no-deps aeon==1.6.0")
    files = Path(found.submodule_search_locations[0], "datasets", "data", "BasicMotions").glob("*.ts")
    lines = [line for file in sorted(files) for line in file.read_text().split("@data\n")[1].splitlines()]
    rows = [line.split(":") for line in lines]
    x = np.array([[channel.split(",") for channel in row[:-1]] for row in rows], dtype=np.float32)
    return x, np.array([CLASSES.index(row[-1]) for row in rows])


if __name__ == "__main__":
    torch.manual_seed(0)
    sites, params = {site: client(site) for site in SITES}, {"server_iterations": 100}
    print(fedcg.simulate(sites, "fedcg", rounds=8, local_epochs=5, lr=3e-3, params=params).table().round(1).to_string())
