"""Four hospitals train a network that classifies tumours as benign or malignant from 30 measurements of their cells.

The data comes from scikit-learn: 569 patients, divided between the hospitals. Each trains on 50 and tests on the rest.
It shows FedAvg, which sends the whole network. The columns are scaled with public numbers from the plan, so the
exported model takes raw measurements. It takes 10 seconds on two CPUs.
"""

import torch
from sklearn.datasets import load_breast_cancer
from torch import nn

import fedcg

SITES = ["site-1", "site-2", "site-3", "site-4"]
CLASSES = ["malignant", "benign"]


def client(site: str) -> fedcg.Client:
    cells = load_breast_cancer(as_frame=True)
    frame = cells.frame.assign(target=cells.target_names[cells.target]).iloc[SITES.index(site) :: len(SITES)]
    columns = dict.fromkeys(cells.feature_names)  # all of them are numbers
    train, test = (fedcg.table(part, columns, "target", CLASSES) for part in (frame[:50], frame[50:]))
    features = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
    model = fedcg.split(nn.Sequential(features, nn.Linear(16, 2)), after="0")
    scale = {"mean": cells.data.mean().tolist(), "std": cells.data.std().tolist()}
    return fedcg.Client(model, train, CLASSES, test, **scale)


if __name__ == "__main__":
    torch.manual_seed(0)
    clients = {site: client(site) for site in SITES}
    run = fedcg.simulate(clients, method="fedavg", rounds=8, local_epochs=5, lr=1e-3)
    print(run.table().round(1).to_string())
