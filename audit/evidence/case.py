"""The attacker's knowledge (`View`, with a `Colluder` if another device helps) and the ground truth (`Truth`). They are different types, so no attack reads the truth by accident.

An attack computes its guess from a `View`; only its score reads the `Truth`. A ceiling is the same attack with a view
to which one named piece of the truth was added on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field, replace
from enum import Enum
from pathlib import Path

import torch

from audit.errors import DecodeError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Aggregate, Method, Weights
from fedcg.learning.networks import NETWORKS
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.privacy import OFF, PrivacySettings
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import FederationSpec, ImageForm, TensorForm
from fedcg.values import Value
from fedcg.wire.parts import Part, Report

_SECRET_BYTES, _CHECK_BYTES = 32, 32


class Colluder(Value):
    """A device of the cohort that shares everything it has with the attacker.

    Attributes:
        secret: the cohort's secret.
        extractor: the start of the whole cohort's extractors: the mean of a sealed sum, or the cohort's start.
    """

    secret: bytes
    extractor: Weights

    @classmethod
    def of(cls, spec: FederationSpec, secret: bytes, before: Mapping[Part, Weights]) -> Colluder:
        """Return the colluder with this secret, who reads the aggregate that a round started from."""
        return cls(secret, before.get(Part.EXTRACTOR) or initial_parts(spec, secret)[Part.EXTRACTOR])


def read_secret(path: Path) -> bytes:
    """Read the cohort's secret of a device (`secrets/cohort.key` in its store) or of a simulation (`initial.json` next to its recording).

    Raises:
        DecodeError: the file can't be read, or holds no secret.
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
    raise DecodeError(f"{path}: the clients of this simulation share no start; run it with --start cohort")


class Knowledge(str, Enum):
    """What an attacker uses in addition to the spec. The values are the words of the report."""

    UPDATE = "the update"
    BATCH = "gradients of single batches, which no device sends"
    BEFORE = "the aggregate that the round started from"
    OTHERS = "the updates of the other clients"
    HISTORY = "the updates and aggregates of earlier rounds"
    START = "the private networks' initial weights, as derived from the public seed"
    AUXILIARY = "labelled images of the same kind"
    CANDIDATES = "a list of images that includes the right one"
    COLLUDER = "the cohort's secret, from one of its devices"
    LATER = "the private extractor, if it is stolen or shared later: the update is kept"
    PRIVATE = "the private extractor itself (never sent: a ceiling)"


class Extractor(str, Enum):
    """The origin of an attacker's extractor. The values are the words of the report."""

    SENT = "sent (whole model)"
    RANDOM = "random"
    START = "start of the public seed"
    SURROGATE = "surrogate"
    COLLUDER = "of a colluding device"
    TRUE = "true"

    @property
    def knowledge(self) -> frozenset[Knowledge]:
        """The knowledge that it needs in addition to the update."""
        needed = {
            Extractor.START: {Knowledge.START},
            Extractor.SURROGATE: {Knowledge.AUXILIARY},
            Extractor.COLLUDER: {Knowledge.COLLUDER},
            Extractor.TRUE: {Knowledge.PRIVATE},
        }
        return frozenset(needed.get(self, set()))

    @property
    def is_own(self) -> bool:
        """Whether it is the device's own, sent or given to the attacker. Figures with it are ceilings for the others."""
        return self in (Extractor.SENT, Extractor.TRUE)


class Earlier(Value):
    """A recorded round: the aggregate that it started from, and what the clients sent that were recorded."""

    before: Aggregate
    updates: Mapping[str, Mapping[Part, Weights]]


class View(Value):
    """Everything that an attacker has of one client in one round.

    Attributes:
        update: decoded, the parts that were sent.
        before: the decoded aggregate that the round started from.
        others: the other clients' updates of the same round, by client.
        report: the fields that were sent with the update.
        auxiliary: labelled images of the same kind that no client holds.
        artifact: sha256 of the update's bytes; empty if only its content is known.
        private: private parts given to the attacker; empty except for ceilings and positive controls.
        colluder: another device of the cohort that helps the attacker; None without one.
        history: the recorded rounds directly before this one in which the client took part, in order.
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
    history: tuple[Earlier, ...] = ()

    @property
    def method(self) -> Method:
        """The federation's method."""
        return get_method(self.spec.method)

    @property
    def hidden(self) -> frozenset[Part]:
        """The networks that only the device sees: private ones, and those of sealed sums."""
        return self.method.payload.private | frozenset(self.spec.sealed) & frozenset(NETWORKS)

    @property
    def shares_extractor(self) -> bool:
        """Whether the whole model is sent."""
        return Part.EXTRACTOR in self.update

    def start(self) -> Mapping[Part, Weights]:
        """Return every part's initial weights from the public seed; without a cohort secret, the device's private parts start from them too."""
        return initial_parts(self.spec, spec_root(self.spec.seed))

    def extractors(self, *wanted: Extractor) -> tuple[Extractor, ...]:
        """Return the extractors to try, in this order: the sent one; else the wanted ones that the attacker can have, and `TRUE`."""
        if self.shares_extractor:
            return (Extractor.SENT,)
        missing = {Extractor.SURROGATE: self.auxiliary is None, Extractor.COLLUDER: self.colluder is None}
        return tuple(one for one in wanted if not missing.get(one, False))

    def with_private(self, parts: Mapping[Part, Weights]) -> View:
        """Return the view of an attacker who was given private parts."""
        return replace(self, private=parts)


class Truth(Value):
    """The truth, which only the device has.

    Attributes:
        train: the images that the round was trained on.
        held_out: images of the same device that were not trained on.
        before: private parts at the start of the round; `after`: at its end. None if not given: then ceilings and
            gradients of single batches can't be computed.
        extras: other state that the device's method keeps after the round, by group (`ClientState.extras`); empty if
            not given.
        privacy: the mechanisms of the device; None if it trains with DP-SGD of unknown settings.
    """

    train: ImageSet
    held_out: ImageSet
    before: Mapping[Part, Weights] | None = None
    after: Mapping[Part, Weights] | None = None
    extras: Mapping[str, Weights] = field(default_factory=dict)
    privacy: PrivacySettings | None = OFF

    def matched(self, stream: torch.Generator, most: int | None = None) -> tuple[ImageSet, ImageSet]:
        """Return training and held-out images: equally many of each class (at most `most`), in the order of the classes."""
        rows: tuple[list[int], list[int]] = ([], [])
        for label in range(len(self.train.classes)):
            found = [torch.nonzero(some.labels == label).flatten() for some in (self.train, self.held_out)]
            count = min(map(len, found))
            for chosen, some in zip(rows, found, strict=True):
                chosen += some[torch.randperm(len(some), generator=stream)[:count][:most]].tolist()
        return self.train.rows(rows[0]), self.held_out.rows(rows[1])


class Case(Value):
    """One update to audit.

    Attributes:
        streams: all random numbers of the audit derive from its seed.
    """

    view: View
    truth: Truth
    streams: Streams

    def model(self) -> Mapping[Part, Weights] | None:
        """Return the device's whole model at the start of the round, private and shared parts; None without `--private`."""
        if self.truth.before is None and self.view.hidden:
            return None
        return {**(self.truth.before or {}), **self.view.before.parts}

    def lacks(
        self,
        *,
        auxiliary: bool = False,
        private: bool = False,
        held_out: bool = False,
        parts: frozenset[Part] = frozenset(),
    ) -> str | None:
        """Return what an attack needs and this case lacks, as a sentence for the report with the remedy; None if nothing is missing."""
        missing = sorted(part.value for part in parts - self.view.update.keys())
        if missing:
            when = f" in round {self.view.round}" if self.view.spec.alternates else ""
            return f"{self.view.spec.method} sends no {' and no '.join(missing)}{when}"
        if auxiliary and (self.view.auxiliary is None or len(self.view.auxiliary) < 2 * self.view.spec.class_count):
            return "the attacker needs labelled images of the same kind: give --auxiliary"
        if private and self.truth.before is None and self.view.hidden:
            return "gradients of single batches need the device's private networks: give --private, a store that has them from before this round"
        if held_out and len(self.truth.held_out) < 2:
            return "no images of the device are held out from training: give some with --held-out"
        return None


def with_images(spec: FederationSpec) -> FederationSpec:
    """Return the spec with pixels of one or three channels as images: more attacks work on images than on tensors."""
    form = spec.input
    channels, *sides = form.shape if isinstance(form, TensorForm) and form.dtype == "uint8" else (0,)
    if channels not in (1, 3) or len(sides) != 2 or min(sides) < 4 or max(sides) > 1024:
        return spec
    mean, std = form.mean or (0.0,) * channels, form.std or (1.0,) * channels
    images = ImageForm(mode="L" if channels == 1 else "RGB", height=sides[0], width=sides[1], mean=mean, std=std)
    return spec.model_copy(update={"input": images})
