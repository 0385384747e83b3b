"""Eq. 11 of FedMD-CG at a cost that does not grow with clients: for every batch and label ONE client is drawn i ~ τ(·, y).

In a batch all rows of a label share the drawn client, so that a step needs at most as many of the clients' classifiers as the
batch has labels. The expectation over draws is eq. 11 itself: each row's client is drawn with probability τ_iy, and eq. 11 is a
sum over rows (which rows share a draw changes the variance alone).

Clients are drawn while they arrive, in any order, by a race: client i needs E / n_i^y for (batch, label), with E ~ Exp(1) of its
own stream; the fastest wins, with probability n_i^y / Σ_j n_j^y = τ_iy (the least of exponentials with rates n_i^y). So only the
leader's rows need to be kept. Labels that are equal modulo `HEATS` run on one E: each label's odds stay τ, and where clients
have similar labels the same one tends to win all of them, so that a batch of many labels needs few classifiers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedcg.learning.aggregation.crossed_teachers import TeacherRows
from fedcg.learning.aggregation.distillation import Bank
from fedcg.learning.seeds import Streams

HEATS = 4  # classifiers that a batch needs where clients are alike; fewer would make a step one client's output
ClassifierOf = Callable[[str], Callable[[torch.Tensor], torch.Tensor]]


class ClientSampling:
    """The races of one bank, and the rows of whoever leads them.

    Args:
        bank: the bank.
        batch: rows of a batch; batches are consecutive.
        classes: C.
        streams: the coordinator's, scoped to (federation, round, attempt).
    """

    def __init__(self, bank: Bank, batch: int, classes: int, streams: Streams) -> None:
        self._streams = streams
        self._race = torch.arange(len(bank)) // batch * classes + bank.labels
        self._labels = torch.arange(int(self._race.max()) + 1) % classes
        self._heat = torch.arange(len(self._labels)) // classes * HEATS + self._labels % HEATS
        self._best = torch.full((len(self._labels),), torch.inf, dtype=torch.float64)
        self._clients: list[str] = []
        self._leader = torch.full((len(self._labels),), -1)
        self._features: torch.Tensor | None = None
        self._log_teacher: torch.Tensor | None = None

    def enter(self, client: str, counts: torch.Tensor) -> torch.Tensor:
        """Let a client run in every race; which rows of the bank it leads now.

        Args:
            client: its id, of whom nothing was entered before.
            counts: [C] float64, n_i^y.

        Returns:
            [n] int64, ascending; `keep` these rows before the next client enters.
        """
        stream = self._streams.generator("bank", "race", client)
        efforts = torch.empty(int(self._heat.max()) + 1, dtype=torch.float64).exponential_(generator=stream)
        seconds = efforts[self._heat] / counts[self._labels]
        leads = seconds < self._best
        for race in ((seconds == self._best) & seconds.isfinite()).nonzero().squeeze(1).tolist():
            leads[race] = client < self._clients[int(self._leader[race])]
        self._best = torch.where(leads, seconds, self._best)
        self._leader[leads] = len(self._clients)
        self._clients.append(client)
        return leads[self._race].nonzero().squeeze(1)

    def keep(self, rows: torch.Tensor, features: torch.Tensor, log_teacher: torch.Tensor) -> None:
        """Keep the outputs of the leader of some rows.

        Args:
            rows: [n] int64.
            features: [n, *shape] G_i(z, y).
            log_teacher: [n, C] log ρ_i.
        """
        if self._features is None or self._log_teacher is None:
            self._features = torch.zeros(len(self._race), *features.shape[1:])
            self._log_teacher = torch.zeros(len(self._race), log_teacher.shape[1])
        self._features[rows], self._log_teacher[rows] = features.cpu(), log_teacher.cpu()

    def winner(self, row: int) -> str | None:
        """Who won the race of a row of the bank; None when no client has its label."""
        leader = int(self._leader[self._race[row]])
        return self._clients[leader] if leader >= 0 else None

    def outputs(self, rows: slice, classifier_of: ClassifierOf, device: str) -> list[TeacherRows]:
        """The winners' outputs on one batch, in client-id order, each of weight 1."""
        if self._features is None or self._log_teacher is None:
            return []
        leaders = self._leader[self._race[rows]]
        names = {self._clients[number]: number for number in leaders.unique().tolist() if number >= 0}
        found = []
        for client, number in sorted(names.items()):
            position = (leaders == number).nonzero().squeeze(1)
            index = position + rows.start
            found.append(
                TeacherRows(
                    classify=classifier_of(client),
                    position=position.to(device),
                    features=self._features[index].to(device),
                    log_teacher=self._log_teacher[index].to(device),
                    weight=torch.ones(len(index), device=device),
                )
            )
        return found
