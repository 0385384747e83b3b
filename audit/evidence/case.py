"""What an attacker has (`View`, with a `Colluder` where another box helps) and what is true (`Truth`): different types, so that no attack reads the truth by accident.

An attack computes its guess from a `View` alone; only its score reads the `Truth`. A ceiling is the same attack with a view to which one piece of the truth was added on purpose, by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path

import torch

from audit.errors import DecodeError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Method, Weights
from fedcg.learning.networks import NETWORKS
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationSpec, ImageForm, TensorForm
from fedcg.wire.parts import Part, Report

_SECRET_BYTES, _CHECK_BYTES = 32, 32


@dataclass(frozen=True)
class Colluder:
    """A box of the cohort that helps the attacker with all it has.

    Attributes:
        secret: the cohort's.
        extractor: what the extractors of the whole cohort started from: the mean of a sealed sum, or the cohort's start.
    """

    secret: bytes
    extractor: Weights

    @classmethod
    def of(cls, spec: FederationSpec, secret: bytes, before: Mapping[Part, Weights]) -> Colluder:
        """Who knows the secret, and with it reads the aggregate that a round started from."""
        return cls(secret, before.get(Part.EXTRACTOR) or initial_parts(spec, secret)[Part.EXTRACTOR])


def read_secret(path: Path) -> bytes:
    """The cohort's secret: of a device (`secrets/cohort.key` in its store), or of a simulation (`initial.json` beside its recording).

    Raises:
        DecodeError: the file can't be read, or holds none.
    """
    try:
        data = path.read_bytes()
        if data[:1] != b"{" and _SECRET_BYTES <= len(data) <= _SECRET_BYTES + _CHECK_BYTES:
            return data[:_SECRET_BYTES]
        root = json.loads(data)["cohort_root"]
        if root is not None:
            return bytes.fromhex(root)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DecodeError(
            f"{path} holds no cohort's secret ({error}): give secrets/cohort.key of an agent's store (decrypted), or initial.json "
            "of a simulation's recording"
        ) from error
    raise DecodeError(f"{path}: the clients of this simulation have no common start; run it with --start cohort")


class Knowledge(str, Enum):
    """What an attacker uses beside the spec, which everybody has. The values are words for a report."""

    UPDATE = "the update"
    BATCH = "the gradient of one batch instead of an update"
    BEFORE = "the aggregate that the round started from"
    OTHERS = "the updates of the other clients"
    START = "the weights that the private networks started from, as the public seed gives them"
    AUXILIARY = "labelled images of the same kind"
    CANDIDATES = "a list of images one of which is the right one"
    COLLUDER = "the cohort's secret, from one of its boxes"
    PRIVATE = "the private extractor itself (not sent; a ceiling)"


class Extractor(str, Enum):
    """Where an attacker's extractor comes from; the values are words for a report."""

    SENT = "sent (whole model)"
    RANDOM = "random"
    START = "start of the public seed"
    SURROGATE = "surrogate"
    COLLUDER = "of a colluding box"
    TRUE = "true"

    @property
    def knowledge(self) -> frozenset[Knowledge]:
        """What it takes beside the update."""
        needed = {
            Extractor.START: {Knowledge.START},
            Extractor.SURROGATE: {Knowledge.AUXILIARY},
            Extractor.COLLUDER: {Knowledge.COLLUDER},
            Extractor.TRUE: {Knowledge.PRIVATE},
        }
        return frozenset(needed.get(self, set()))

    @property
    def is_own(self) -> bool:
        """Whether it is the device's own: sent, or given to the attacker. Figures with it are ceilings of the others."""
        return self in (Extractor.SENT, Extractor.TRUE)


@dataclass(frozen=True)
class View:
    """All that an attacker has of one client in one round.

    Attributes:
        update: decoded, the parts that were sent.
        before: the decoded aggregate that the round started from.
        others: the other clients' updates of the same round, by client.
        report: the fields that were sent with the update.
        auxiliary: labelled images of the same kind that no client holds.
        artifact: sha256 of the update's bytes; empty where only its content is known.
        private: private parts that the attacker has been given: empty, but for ceilings and positive controls.
        colluder: another box of the cohort that helps the attacker; None where none does.
    """

    spec: FederationSpec
    client: str
    round: int
    update: Mapping[Part, Weights]
    before: Aggregate
    others: Mapping[str, Mapping[Part, Weights]] = field(default_factory=dict)
    report: Report = field(default_factory=Report)
    auxiliary: ImageSet | None = None
    private: Mapping[Part, Weights] = field(default_factory=dict)
    artifact: str = ""
    colluder: Colluder | None = None

    @property
    def method(self) -> Method:
        """The federation's method."""
        return get_method(self.spec.method)

    @property
    def hidden(self) -> frozenset[Part]:
        """The networks that nobody else sees: private ones, and those of sealed sums."""
        return self.method.payload.private | frozenset(self.spec.sealed) & frozenset(NETWORKS)

    @property
    def shares_extractor(self) -> bool:
        """Whether the whole model is sent."""
        return Part.EXTRACTOR in self.update

    def start(self) -> Mapping[Part, Weights]:
        """Every part's initial weights by the public seed: those of the private parts too, where the device has no cohort secret."""
        return initial_parts(self.spec, spec_root(self.spec.seed))

    def extractors(self, *wanted: Extractor) -> tuple[Extractor, ...]:
        """Those that are tried, in this order: the one that was sent; else the wanted ones that the attacker can have, and `TRUE`."""
        if self.shares_extractor:
            return (Extractor.SENT,)
        missing = {Extractor.SURROGATE: self.auxiliary is None, Extractor.COLLUDER: self.colluder is None}
        return tuple(one for one in wanted if not missing.get(one, False))

    def with_private(self, parts: Mapping[Part, Weights]) -> View:
        """The view of an attacker who has been given private parts."""
        return replace(self, private=parts)


@dataclass(frozen=True)
class Truth:
    """What only the device knows.

    Attributes:
        train: the images that the round was trained on.
        held_out: images of the same device that no training has seen.
        before: private parts as the round started; `after` as it ended. None where they were not given: then nothing that needs
            them (ceilings, gradients of single batches) can be computed.
        extras: what else the device's method keeps after the round, by group (`ClientState.extras`); empty where it was not given.
    """

    train: ImageSet
    held_out: ImageSet
    before: Mapping[Part, Weights] | None = None
    after: Mapping[Part, Weights] | None = None
    extras: Mapping[str, Weights] = field(default_factory=dict)

    def matched(self, stream: torch.Generator, most: int | None = None) -> tuple[ImageSet, ImageSet]:
        """Images trained on and held out: equally many of each class (`most` at most), in the order of the classes."""
        rows: tuple[list[int], list[int]] = ([], [])
        for label in range(len(self.train.classes)):
            found = [torch.nonzero(some.labels == label).flatten() for some in (self.train, self.held_out)]
            count = min(map(len, found))
            for chosen, some in zip(rows, found, strict=True):
                chosen += some[torch.randperm(len(some), generator=stream)[:count][:most]].tolist()
        return self.train.rows(rows[0]), self.held_out.rows(rows[1])


@dataclass(frozen=True)
class Case:
    """One update under audit.

    Attributes:
        streams: every random number of the audit follows from its seed.
    """

    view: View
    truth: Truth
    streams: Streams

    def model(self, *, after: bool = False) -> Mapping[Part, Weights] | None:
        """The device's whole model as the round started (or ended): its private parts and the shared ones; None without `--private`."""
        private = self.truth.after if after else self.truth.before
        if private is None and self.view.hidden:
            return None
        return {**(private or {}), **(self.view.update if after else self.view.before.parts)}

    def lacks(
        self,
        *,
        auxiliary: bool = False,
        private: bool = False,
        held_out: bool = False,
        parts: frozenset[Part] = frozenset(),
    ) -> str | None:
        """What an attack needs and this case has not, as a sentence for the report with the remedy; None where all is there."""
        missing = sorted(part.value for part in parts - self.view.update.keys())
        if missing:
            when = f" in round {self.view.round}" if self.view.spec.alternates else ""
            return f"{self.view.spec.method} sends no {' and no '.join(missing)}{when}"
        if auxiliary and (self.view.auxiliary is None or len(self.view.auxiliary) < 2 * self.view.spec.class_count):
            return "the attacker needs labelled images of the same kind: give --auxiliary"
        if private and self.truth.before is None and self.view.hidden:
            return "the gradients of single batches follow from the device's private networks: give --private, a store that has them from before this round"
        if held_out and len(self.truth.held_out) < 2:
            return "there are no images of the device that were not trained on: give some as --held-out"
        return None


def with_images(spec: FederationSpec) -> FederationSpec:
    """The spec, with pixels of one or three channels as images, which more attacks work on than on tensors."""
    form = spec.input
    channels, *sides = form.shape if isinstance(form, TensorForm) and form.dtype == "uint8" else (0,)
    if channels not in (1, 3) or len(sides) != 2 or min(sides) < 4 or max(sides) > 1024:
        return spec
    mean, std = form.mean or (0.0,) * channels, form.std or (1.0,) * channels
    images = ImageForm(mode="L" if channels == 1 else "RGB", height=sides[0], width=sides[1], mean=mean, std=std)
    return spec.model_copy(update={"input": images})
