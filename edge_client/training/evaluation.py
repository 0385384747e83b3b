"""The quality of a personal model on this device, and the better one of two. Uses torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edge_client.training.local_data import RoundData
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import Evaluation, Weights
from fedcg.learning.networks.assembly import personal_parts
from fedcg.learning.spec import FederationSpec
from fedcg.learning.training.evaluation import evaluate, is_preferred
from fedcg.wire.parts import Part


@dataclass(frozen=True)
class Measured:
    """Accuracies in [0, 1] of one personal model; None where there are no images to measure on.

    Attributes:
        val: on the validation split; it alone decides between two models, with `val_loss` between equals.
        test: on this device's held-out images.
        common: on the balanced set that all clients of a demo share.
        by_class: `test` by class, to four digits; None for a class without test images.
    """

    val: float | None = None
    val_loss: float | None = None
    test: float | None = None
    common: float | None = None
    by_class: tuple[float | None, ...] | None = None

    def beats(self, other: Measured | None) -> bool:
        """Whether validation prefers this model; without validation images the newer one, this, is preferred."""
        return other is None or is_preferred(self.val, self.val_loss, other.val, other.val_loss)

    def as_scores(self, prefix: str) -> dict[str, float]:
        """The measured figures, by name, to be kept with a generation."""
        named = {"val": self.val, "val_loss": self.val_loss, "test": self.test, "common": self.common}
        return {f"{prefix}.{name}": value for name, value in named.items() if value is not None}

    @staticmethod
    def from_scores(scores: Mapping[str, float], prefix: str) -> Measured:
        """The inverse of `as_scores`."""
        val, val_loss, test, common = (scores.get(f"{prefix}.{name}") for name in ("val", "val_loss", "test", "common"))
        return Measured(val, val_loss, test, common)


def measure(
    spec: FederationSpec, parts: Mapping[Part, Weights], data: RoundData, common: ImageSet | None, place: str
) -> Measured:
    """Evaluate a personal model on validation, test and common images."""
    found = [
        evaluate(spec, parts, images, place) if images is not None and len(images) else None
        for images in (data.val, data.test, common)
    ]
    val, test, shared = found
    return Measured(
        val=None if val is None else val.accuracy,
        val_loss=None if val is None else val.loss,
        test=None if test is None else test.accuracy,
        common=None if shared is None else shared.accuracy,
        by_class=None if test is None else _by_class(test),
    )


def with_downloaded(
    spec: FederationSpec, parts: Mapping[Part, Weights], aggregate: Mapping[Part, Weights]
) -> Mapping[Part, Weights] | None:
    """A personal model with the downloaded parts in place; None where the aggregate holds none of its parts."""
    own = personal_parts(spec, parts)
    return {part: aggregate.get(part, own[part]) for part in own} if own.keys() & aggregate.keys() else None


def _by_class(test: Evaluation) -> tuple[float | None, ...]:
    counts = zip(test.correct_per_class, test.images_per_class, strict=True)
    return tuple(round(correct / images, 4) if images else None for correct, images in counts)
