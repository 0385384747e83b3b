"""Which labels a round may distil: a label that no present client has ever seen has no teacher.

FedCG draws labels uniformly (algorithm 2 line 4). When EVERY client of a round reported its label counts, labels that none of them
has get probability 0 and the others share it evenly; with any count missing, all labels count, as published.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


def label_probabilities(label_counts: Iterable[tuple[int, ...] | None], classes: int) -> torch.Tensor:
    """What labels are drawn from: uniform over those that some client has, or over all when a client did not report its counts.

    Args:
        label_counts: n_i^y of every client of the round; None for one that did not report it.
        classes: C.

    Returns:
        [C] float64, sums to 1.
    """
    reported = list(label_counts)
    known = torch.ones(classes, dtype=torch.float64)
    if reported and None not in reported:
        known = (torch.tensor(reported, dtype=torch.float64).sum(dim=0) > 0).to(torch.float64)
    if not known.any():  # no client has an image of any class: nothing is known of labels either
        known = torch.ones(classes, dtype=torch.float64)
    return known / known.sum()


def row_weights(label_counts: Iterable[tuple[int, ...] | None], classes: int, labels: torch.Tensor) -> torch.Tensor:
    """Weights that make rows with uniformly drawn labels count as drawn from `label_probabilities`.

    Args:
        label_counts: as in `label_probabilities`.
        classes: C.
        labels: [rows] int64, drawn uniformly.

    Returns:
        [rows] float32: C / K for K known labels, 0 for an unknown one; exactly 1 when all are known.
    """
    return (label_probabilities(label_counts, classes) * classes).to(torch.float32)[labels]
