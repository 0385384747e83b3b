"""How images are spread over clients: the partition that a person names, and the arithmetic of shares and whole numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experiments.errors import SourceError

MAX_REDRAWS = 1000

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class Partition:
    """How images are spread over clients.

    Attributes:
        kind: `iid`; `dirichlet` with concentration `omega` (ω; smaller is more skewed); `classes`, classes and clients in as many
            `groups` of neighbours, the classes of a group evenly over its clients; `domains`, one client per domain.
        domains: which domains are clients, in this order; all when empty.
    """

    kind: Literal["iid", "dirichlet", "classes", "domains"]
    omega: float = 0.0
    domains: tuple[str, ...] = ()
    groups: int = 1

    @staticmethod
    def parse(text: str) -> Partition:
        """Read `iid`, `dirichlet:OMEGA`, `classes:GROUPS`, `domains` or `domains:NAME,NAME,…`.

        Raises:
            SourceError: anything else.
        """
        kind, colon, value = text.partition(":")
        if text == "iid":
            return Partition("iid")
        if kind == "domains":
            names = tuple(name.strip() for name in value.split(",")) if colon else ()
            if not all(names) or len(set(names)) != len(names):
                raise SourceError(f"partition {text!r}: name different domains, as in `domains:amazon,dslr`")
            return Partition("domains", domains=names)
        if kind == "classes" and re.fullmatch(r"[1-9]\d{0,3}", value) and value != "1":
            return Partition("classes", groups=int(value))
        try:
            omega = float(value)
        except ValueError:
            omega = -1.0
        if kind != "dirichlet" or not 0 < omega < float("inf"):
            raise SourceError(
                f"partition {text!r} is neither `iid`, `domains[:NAME,…]`, `classes:GROUPS` with two groups or more, nor "
                "`dirichlet:OMEGA` with a positive number"
            )
        return Partition("dirichlet", omega)

    def shares(self, clients: int, classes: int, generator: np.random.Generator) -> Shares:
        """Which share of each class each client gets: [clients, classes] float64, every column sums to 1.

        Raises:
            SourceError: more groups of classes than clients or classes.
        """
        if self.kind == "iid":
            return np.full((clients, classes), 1.0 / clients)
        if self.kind == "classes":
            if self.groups > min(clients, classes):
                raise SourceError(
                    f"partition classes:{self.groups}: {clients} clients and {classes} classes can't be put into "
                    f"{self.groups} groups; at most {min(clients, classes)}"
                )
            group_of_client, group_of_class = (np.arange(count) * self.groups // count for count in (clients, classes))
            together = (group_of_client[:, None] == group_of_class[None]).astype(np.float64)
            evenly: Shares = together / together.sum(axis=0)
            return evenly
        return generator.dirichlet(np.full(clients, self.omega), size=classes).T


def cut(count: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Cut `count` things by shares that sum to 1: whole numbers that sum to `count`, each within 1 of its share."""
    edges = np.rint(np.cumsum(shares) * count).astype(np.int64)
    edges[-1] = count
    pieces: NDArray[np.int64] = np.diff(edges, prepend=0)
    return pieces


def limit(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Reduce class counts to a total of at most `most`, keeping their proportions (largest remainders)."""
    total = int(counts.sum())
    if total <= most:
        return counts
    exact = counts * (most / total)
    kept: NDArray[np.int64] = np.floor(exact).astype(np.int64)
    largest = np.argsort(kept - exact, kind="stable")[: most - int(kept.sum())]
    kept[largest] += 1
    return kept


def draw_shares(
    partition: Partition, clients: int, pool: NDArray[np.int64], least: int, generator: np.random.Generator
) -> Shares:
    """Draw shares until every client gets at least `least` of the images.

    Args:
        partition: how classes are spread.
        clients: number of clients.
        pool: [classes] images per class.
        least: images per client.
        generator: the stream.

    Raises:
        SourceError: no draw gives every client as many.
    """
    for _ in range(MAX_REDRAWS):
        shares = partition.shares(clients, len(pool), generator)
        if (shares @ pool).min() >= least:
            return shares
    raise SourceError(
        f"{int(pool.sum())} training images can't be split over {clients} clients with at least {least} each: "
        "use fewer clients, more images or a larger omega"
    )
