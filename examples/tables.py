"""Four hospitals federate a network that tells benign from malignant tumours by 30 measurements of their cells.

The data is scikit-learn's, 569 patients dealt out: a hospital learns from 50 and is measured on the others.
It shows FedAvg, in which the whole network leaves its site. 10 seconds on two CPUs.
"""

import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import fedcg

SITES = ["site-1", "site-2", "site-3", "site-4"]


def client(site: str) -> fedcg.Client:
    table = load_breast_cancer()
    mine = slice(SITES.index(site), None, len(SITES))
    x, y = StandardScaler().fit_transform(table.data[mine]), table.target[mine]
    net = nn.Sequential(nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU()), nn.Linear(16, 2))
    return fedcg.Client(
        model=fedcg.split(net, after="0"),
        train=(x[:50], y[:50]),
        test=(x[50:], y[50:]),
        classes=list(table.target_names),
    )


if __name__ == "__main__":
    torch.manual_seed(0)
    clients = {site: client(site) for site in SITES}
    run = fedcg.simulate(clients, method="fedavg", rounds=8, local_epochs=5, lr=1e-3)
    print(run.table().round(1).to_string())
