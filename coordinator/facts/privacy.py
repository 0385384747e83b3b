"""What a device reports of its own privacy: the figures of its audit, and what its differentially private training has spent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.storage.overview_store import Delivery

TITLES = {
    "label_l1": "label distribution, L1 distance",
    "label_accuracy": "labels of a batch, share that is right",
    "psnr": "reconstructed images, PSNR in dB",
    "ssim": "reconstructed images, SSIM",
    "rank": "rank of the true image among candidates",
    "reid": "true image found among candidates, share",
    "mia_auc": "membership of an image, AUC",
    "mia_tpr": "membership, true positives at 1 % false positives",
    "class_recognised": "images of a class by a GAN, probability of the class by independent judges",
    "class_ssim": "images of a class by a GAN, SSIM",
    "memory_auc": "training images or others, by the generator, AUC",
    "inverter_psnr": "images from the generator's features, PSNR in dB",
    "inverter_ssim": "images from the generator's features, SSIM",
    "extractor": "private extractor, share of its features that is told",
    "epsilon": "lower bound on epsilon, by canaries",
}


@dataclass(frozen=True)
class ReportedPrivacy:
    """What a device's last update reports, as far as its owner allows it.

    Attributes:
        round: of the update.
        gains: (what was attacked, gain over the best guess at most), in a fixed order.
        spent: in words, e.g. "epsilon 3.2 of 8 at delta 1e-05"; empty where it is not reported.
    """

    round: int
    gains: list[tuple[str, float]]
    spent: str


def reported_privacy(last: Delivery) -> ReportedPrivacy | None:
    """The privacy figures in an update; None where it reports none."""
    found = last.report.get("audit") or {}
    gains = [(TITLES[name], float(found[name])) for name in TITLES if name in found]
    spent = _in_words(last.report.get("epsilon"))
    return ReportedPrivacy(last.round, gains, spent) if gains or spent else None


def _in_words(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return ""
    budget = "" if spent.get("budget") is None else f" of {spent['budget']:g}"
    return f"epsilon {spent['epsilon']:.3g}{budget} at delta {spent['delta']:g}"
