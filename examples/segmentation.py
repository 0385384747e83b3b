"""Four sites segment discs and squares in noisy pictures, with a small U-Net and their own training loop.

The script draws the pictures: 24 training pictures per site, each site with its own brightness. It shows a
`fedcg.Trainer` for a task other than classification. The first layer stays at its site (`private`). The table has 100
times the mean IoU. It takes 20 seconds on two CPUs.
"""

import numpy as np
import torch
from torch import nn

import fedcg

SITES = ["site-1", "site-2", "site-3", "site-4"]


class Skip(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


class Segmentation(fedcg.Trainer):
    private, metric, examples = ["0.*"], "iou", 24

    def __init__(self, site: str) -> None:
        self.x, self.y = pictures(SITES.index(site), 108)

    def train(self, model: nn.Module, context: fedcg.TrainerContext) -> None:
        optimiser = torch.optim.Adam(model.parameters(), lr=context.lr)
        for rows in (rows for _ in range(context.epochs) for rows in torch.randperm(24).split(context.batch_size)):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(self.x[rows]), self.y[rows]).backward()
            optimiser.step()

    def evaluate(self, model: nn.Module, rows: slice = slice(24, 48)) -> dict[str, float]:
        found, true = (one[..., None] == torch.arange(3) for one in (model(self.x[rows]).argmax(1), self.y[rows]))
        return {"iou": float(((found & true).sum((0, 1, 2)) / (found | true).sum((0, 1, 2))).mean())}

    def test(self, model: nn.Module) -> dict[str, float]:
        return self.evaluate(model, slice(48, None))


def client(site: str) -> fedcg.Client:
    coarse = Skip(nn.MaxPool2d(2), nn.Conv2d(12, 24, 5, padding=2), nn.ReLU(), nn.Upsample(scale_factor=2))
    net = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), coarse, nn.Conv2d(36, 3, 5, padding=2))
    return fedcg.Client(model=net, trainer=Segmentation(site), example=torch.zeros(1, 32, 32))


def pictures(number: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    random, (radius, half) = np.random.default_rng(number), np.random.default_rng(9).integers(4, 8, (2, count, 1, 1))
    away = np.abs(np.mgrid[0:32, 0:32][:, None, None] - random.integers(6, 26, (2, 2, count, 1, 1)))
    masks = np.where(away[:, 1].max(0) < half, 2, np.hypot(*away[:, 0]) < radius)[:, None]  # squares, discs, ground
    drawn = (masks > 0) * (0.4 + 0.1 * number) + random.normal(0.1 * number, 0.15, masks.shape)
    return torch.from_numpy(drawn).float(), torch.from_numpy(masks[:, 0])


if __name__ == "__main__":
    torch.manual_seed(0)
    sites = {site: client(site) for site in SITES}
    run = fedcg.simulate(sites, "fedsplit", rounds=8, local_epochs=4, batch_size=8, lr=5e-3)
    print(run.table().round(1).to_string())
