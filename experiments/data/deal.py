"""Partitions the images of a source between clients, and into training, validation and test images.

The seed determines everything, so folders of a demo and arrays of a simulation agree. Decodes and writes nothing.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from experiments.data.source import Picture, PicturesPerClass, Source
from experiments.errors import SourceError
from fedcg.values import Value

MAX_REDRAWS = 1000

Shares = NDArray[np.float64]


class Partition(Value):
    """How images are divided between clients.

    Attributes:
        kind: `iid`; `dirichlet` with concentration `omega` (ω; smaller is more skewed); `classes`, where classes and
            clients form `groups` of neighbours, and the classes of a group are divided evenly between its clients;
            `domains`, one client per domain.
        domains: the domains that are clients, in this order; empty: all.
    """

    kind: Literal["iid", "dirichlet", "classes", "domains"]
    omega: float = 0.0
    domains: tuple[str, ...] = ()
    groups: int = 1

    @staticmethod
    def parse(text: str) -> Partition:
        """Parse `iid`, `dirichlet:OMEGA`, `classes:GROUPS`, `domains` or `domains:NAME,NAME,…`.

        Raises:
            SourceError: the text has another form.
        """
        kind, colon, value = text.partition(":")
        if text == "iid":
            return Partition("iid")
        if kind == "domains":
            names = tuple(name.strip() for name in value.split(",")) if colon else ()
            if not all(names) or len(set(names)) != len(names):
                raise SourceError(f"partition {text!r}: name each domain once, as in `domains:amazon,dslr`")
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
        """Return the share of each class that each client gets: [clients, classes] float64; every column sums to 1.

        Raises:
            SourceError: there are more groups than clients or classes.
        """
        if self.kind == "iid":
            return np.full((clients, classes), 1.0 / clients)
        if self.kind == "classes":
            if self.groups > min(clients, classes):
                raise SourceError(
                    f"partition classes:{self.groups}: {clients} clients and {classes} classes can't form "
                    f"{self.groups} groups; at most {min(clients, classes)}"
                )
            group_of_client, group_of_class = (np.arange(count) * self.groups // count for count in (clients, classes))
            together = (group_of_client[:, None] == group_of_class[None]).astype(np.float64)
            evenly: Shares = together / together.sum(axis=0)
            return evenly
        drawn: Shares = generator.dirichlet(np.full(clients, self.omega), size=classes)
        by_client: Shares = drawn.T
        return by_client


def cut(count: int, shares: NDArray[np.float64]) -> NDArray[np.int64]:
    """Divide `count` items by shares that sum to 1: integers that sum to `count`, each within 1 of its share."""
    edges = np.rint(np.cumsum(shares) * count).astype(np.int64)
    edges[-1] = count
    return np.diff(edges, prepend=0)


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
        partition: how classes are divided.
        clients: number of clients.
        pool: [classes] images per class.
        least: minimum number of images per client.
        generator: the random stream.

    Raises:
        SourceError: no draw gives every client enough images.
    """
    for _ in range(MAX_REDRAWS):
        shares = partition.shares(clients, len(pool), generator)
        if (shares @ pool).min() >= least:
            return shares
    raise SourceError(
        f"{int(pool.sum())} training images can't be split over {clients} clients with at least {least} each: "
        "use fewer clients, more images or a larger omega"
    )


MIN_TRAIN_IMAGES = 40  # two batches of 16 after a validation split
COMMON_PER_CLASS = 200  # a sampling error of about one point with ten classes

Validation = Literal["share", "test-half"]
TestDeal = Literal["proportional", "even", "all"]

# Purposes of streams that were added later; separate streams leave earlier draws unchanged.
_EVEN, _PUBLIC, _DOMAIN, _UNHELD = 1, 2, 3, 4


class DealOptions(Value):
    """The settings of a partition, apart from the source.

    Attributes:
        clients: number of clients.
        partition: how images are divided between them.
        seed: determines everything.
        images_per_client: maximum number of training images per client, with class proportions kept; None: unlimited.
        validation: `share`: part of the training images by content hash, unless the source has validation images;
            `test-half`: half of a client's test images (FedCG's protocol: all training images are used for training).
        test: `proportional`: a client's test images follow its training images' class proportions, and one balanced
            common set is held out; `even`: the test images are divided evenly at random, and the common set is all of
            them (FedMD-CG appendix E); `all`: every client is tested on all of them, or on all of its domain's.
        public_images: number of unlabelled training images for the server (FedDF); disjoint from every client's.
    """

    clients: int
    partition: Partition
    seed: int
    images_per_client: int | None = None
    validation: Validation = "share"
    test: TestDeal = "proportional"
    public_images: int = 0


class ClientPictures(Value):
    """One client's images per class; `val` is None if a share of `train` is taken by content hash."""

    train: PicturesPerClass
    val: PicturesPerClass | None
    test: PicturesPerClass
    domain: str | None = None


class Deal(Value):
    """The result of a partition.

    Attributes:
        classes: class names in label order.
        clients: by id, in id order.
        common: one test set for all, per class.
        public: unlabelled images for the server.
    """

    classes: tuple[str, ...]
    clients: Mapping[str, ClientPictures]
    common: PicturesPerClass
    public: tuple[Picture, ...] = ()


def client_names(clients: int) -> tuple[str, ...]:
    """Return ids `client-1` …, zero-padded so that they sort by number."""
    width = len(str(clients))
    return tuple(f"client-{number:0{width}d}" for number in range(1, clients + 1))


def deal_out(source: Source, options: DealOptions) -> Deal:
    """Partition a source's images; every training image is used at most once.

    Raises:
        SourceError: too few images for the clients, or unknown domains.
    """
    if options.partition.kind == "domains":
        return _by_domain(source, options)
    generator = np.random.default_rng(options.seed)
    train, test, common_count = _hold_out(source, generator)
    public: PicturesPerClass = ()
    if options.public_images and options.images_per_client is None:
        half = sum(map(len, train)) // 2
        public, train = _draw(train, min(options.public_images, half), options.seed)
    least = MIN_TRAIN_IMAGES if options.images_per_client is None else min(MIN_TRAIN_IMAGES, options.images_per_client)
    pool = np.array([len(pictures) for pictures in train], dtype=np.int64)
    shares = draw_shares(options.partition, options.clients, pool, least, generator)
    trains, left = _hand_out(train, shares, options.images_per_client)
    if options.public_images and options.images_per_client is not None:
        public, _ = _draw(left, options.public_images, options.seed)
    tests, common = _deal_tests(test, shares, common_count, options)
    vals: Sequence[PicturesPerClass | None] = [None] * options.clients
    if source.val is not None:
        vals, _ = _hand_out(_shuffled(source.val, generator), shares, None)
    clients = [_client(options, *parts) for parts in zip(trains, vals, tests, strict=True)]
    return Deal(
        source.classes,
        dict(zip(client_names(options.clients), clients, strict=True)),
        common,
        _checked_public(public, options, "no training images remain: lower the images per client"),
    )


def _client(
    options: DealOptions,
    train: PicturesPerClass,
    val: PicturesPerClass | None,
    test: PicturesPerClass,
    domain: str | None = None,
) -> ClientPictures:
    if options.validation == "share":
        return ClientPictures(train, val, test, domain)
    first, second = _halves(test)
    return ClientPictures(train, first, second, domain)


def _halves(pictures: PicturesPerClass) -> tuple[PicturesPerClass, PicturesPerClass]:
    """Take every second image, counted across the classes: both halves keep the proportions."""
    starts = np.cumsum([0, *map(len, pictures)])[:-1]
    return (
        tuple(of_class[int(start) % 2 :: 2] for start, of_class in zip(starts, pictures, strict=True)),
        tuple(of_class[1 - int(start) % 2 :: 2] for start, of_class in zip(starts, pictures, strict=True)),
    )


def _shuffled(pictures: PicturesPerClass, generator: np.random.Generator) -> PicturesPerClass:
    return tuple(tuple(of_class[index] for index in generator.permutation(len(of_class))) for of_class in pictures)


def _hold_out(source: Source, generator: np.random.Generator) -> tuple[PicturesPerClass, PicturesPerClass, int]:
    """Return shuffled training and test images, and how many test images of each class, from the start, form the common set."""
    train = _shuffled(source.train, generator)
    if source.test is not None:
        test = _shuffled(source.test, generator)
        return train, test, min(COMMON_PER_CLASS, max(1, min(map(len, test)) // 5))
    common = min(COMMON_PER_CLASS, max(1, min(map(len, train)) // 6))
    held = [common + max(1, len(pictures) // 6) for pictures in train]
    parts = list(zip(train, held, strict=True))
    return (
        tuple(pictures[count:] for pictures, count in parts),
        tuple(pictures[:count] for pictures, count in parts),
        common,
    )


def _hand_out(
    pool: PicturesPerClass, shares: Shares, most: int | None
) -> tuple[list[PicturesPerClass], PicturesPerClass]:
    """Return disjoint images per client and class, in the proportions of `shares`, at most `most` per client; and the rest."""
    counts = np.stack([cut(len(pictures), shares[:, label]) for label, pictures in enumerate(pool)], axis=1)
    starts = np.cumsum(counts, axis=0) - counts
    kept = np.stack([row if most is None else limit(row, most) for row in counts])
    dealt = [
        tuple(pictures[start : start + count] for pictures, start, count in zip(pool, *rows, strict=True))
        for rows in zip(starts.tolist(), kept.tolist(), strict=True)
    ]
    left = tuple(
        tuple(
            picture
            for client in range(len(shares))
            for picture in pictures[
                starts[client, label] + kept[client, label] : starts[client, label] + counts[client, label]
            ]
        )
        for label, pictures in enumerate(pool)
    )
    return dealt, left


def _deal_tests(
    test: PicturesPerClass, shares: Shares, common: int, options: DealOptions
) -> tuple[list[PicturesPerClass], PicturesPerClass]:
    """Return test images per client, and the common ones."""
    if options.test == "proportional":
        rest = tuple(pictures[common:] for pictures in test)
        return _hand_out(rest, shares, None)[0], tuple(pictures[:common] for pictures in test)
    if options.test == "all":
        return [test] * options.clients, test
    flat = [(label, picture) for label, pictures in enumerate(test) for picture in pictures]
    order = np.random.default_rng([options.seed, _EVEN]).permutation(len(flat))
    dealt = [
        _regrouped([flat[index] for index in chosen], len(test)) for chosen in np.array_split(order, options.clients)
    ]
    return dealt, test


def draw_unheld(source: Source, deal: Deal, most: int, seed: int) -> PicturesPerClass:
    """Return at most `most` random images of a source that no client holds; the common test set if clients hold all of them.

    Args:
        source: the partitioned source, the same object.
        deal: its partition.
        most: maximum number of images.
        seed: determines the choice.
    """
    held = {
        picture
        for client in deal.clients.values()
        for part in (client.train, client.val or (), client.test)
        for picture in itertools.chain.from_iterable(part)
    }
    parts = [part for part in (source.train, source.test, source.val) if part is not None]
    free = tuple(
        tuple(picture for part in parts for picture in part[label] if picture not in held)
        for label in range(len(source.classes))
    )
    return _draw(free if any(free) else deal.common, most, seed, _UNHELD)[0]


def _draw(
    pool: PicturesPerClass, count: int, seed: int, purpose: int = _PUBLIC
) -> tuple[PicturesPerClass, PicturesPerClass]:
    """Return `count` random images (all, if there are fewer), and the others."""
    flat = [(label, picture) for label, pictures in enumerate(pool) for picture in pictures]
    order = np.random.default_rng([seed, purpose]).permutation(len(flat))
    parts = order[:count], np.sort(order[count:])
    drawn, rest = (_regrouped([flat[index] for index in part], len(pool)) for part in parts)
    return drawn, rest


def _regrouped(labelled: Sequence[tuple[int, Picture]], classes: int) -> PicturesPerClass:
    groups: list[list[Picture]] = [[] for _ in range(classes)]
    for label, picture in labelled:
        groups[label].append(picture)
    return tuple(map(tuple, groups))


def _checked_public(pictures: PicturesPerClass, options: DealOptions, reason: str) -> tuple[Picture, ...]:
    public = tuple(itertools.chain.from_iterable(pictures))
    if options.public_images and not public:
        raise SourceError(f"the method needs unlabelled public images, but {reason}")
    return public


def _by_domain(source: Source, options: DealOptions) -> Deal:
    """Make one client per domain. A domain without a test part is halved, as in FedCG for Office and DomainNet."""
    known = {domain.name: (number, domain) for number, domain in enumerate(source.domains)}
    names = options.partition.domains or tuple(known)
    unknown = [name for name in names if name not in known]
    if unknown or not known:
        there = f"its domains are {', '.join(known)}" if known else "it has no domains (ROOT/DOMAIN/CLASS/*)"
        raise SourceError(f"{source.name}: partition by domain{f' {unknown[0]!r}' if unknown else ''}: {there}")
    if len(names) != options.clients:
        raise SourceError(
            f"{source.name}: {len(names)} domains ({', '.join(names)}) and {options.clients} clients: use {len(names)} "
            "clients, or select domains, as in `domains:amazon,dslr`"
        )
    tests: list[PicturesPerClass] = []
    trains: list[PicturesPerClass] = []
    for name in names:
        number, domain = known[name]
        generator = np.random.default_rng([options.seed, _DOMAIN, number])
        train = _shuffled(domain.train, generator)
        train, test = _halves(train) if domain.test is None else (train, _shuffled(domain.test, generator))
        counts = limit(np.array([len(pictures) for pictures in train]), options.images_per_client or sys.maxsize)
        trains.append(tuple(pictures[:count] for pictures, count in zip(train, counts.tolist(), strict=True)))
        tests.append(test)
    tests, common = _domains_common(tests, options)
    vals = [known[name][1].val for name in names]
    clients = [_client(options, *parts) for parts in zip(trains, vals, tests, names, strict=True)]
    others = [domain.train for name, (_, domain) in known.items() if name not in names]
    pool = tuple(tuple(itertools.chain.from_iterable(of_class)) for of_class in zip(*others, strict=True))
    public, _ = _draw(pool, options.public_images, options.seed)
    return Deal(
        source.classes,
        dict(zip(client_names(len(names)), clients, strict=True)),
        common,
        _checked_public(public, options, "every domain is a client: select domains, as in `domains:amazon,dslr`"),
    )


def _domains_common(
    tests: list[PicturesPerClass], options: DealOptions
) -> tuple[list[PicturesPerClass], PicturesPerClass]:
    """Hold out equally many test images of every class and domain for the common set, as far as a domain has them."""
    if options.test != "proportional":
        return tests, tuple(tuple(itertools.chain.from_iterable(of_class)) for of_class in zip(*tests, strict=True))
    fewest = min((len(pictures) // 5 for test in tests for pictures in test if pictures), default=0)
    share = min(max(1, COMMON_PER_CLASS // len(tests)), max(1, fewest))
    held = [[min(share, len(pictures) // 2) for pictures in test] for test in tests]
    common = tuple(
        tuple(picture for test, counts in zip(tests, held, strict=True) for picture in test[label][: counts[label]])
        for label in range(len(tests[0]))
    )
    rest = [
        tuple(pictures[count:] for pictures, count in zip(test, counts, strict=True))
        for test, counts in zip(tests, held, strict=True)
    ]
    return rest, common
