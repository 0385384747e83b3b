"""Breast cancer from 30 measurements of a cell, four hospitals: a small network on a table.

python examples/tables.py
"""

import numpy as np
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import fedcg

SITES = ("north", "east", "south", "west")


def client(site: str) -> fedcg.Client:
    """What one hospital has: every fourth patient, a third of them to test with."""
    table = load_breast_cancer()
    mine = np.arange(SITES.index(site), len(table.target), len(SITES))
    x, y = StandardScaler().fit_transform(table.data[mine]), table.target[mine]
    net = nn.Sequential(nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()), nn.Linear(16, 2))
    third = len(mine) // 3
    return fedcg.Client(
        model=fedcg.split(net, after="0"),
        train=(x[third:], y[third:]),
        test=(x[:third], y[:third]),
        classes=list(table.target_names),
        name=site,
    )


if __name__ == "__main__":
    run = fedcg.simulate([client(site) for site in SITES], method="fedcg", rounds=5, local_epochs=5, lr=1e-3)
    print(run.table().round(1))
