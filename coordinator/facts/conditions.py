"""What devices reported of themselves: the findings of their own doctors with remedies, the figures of their audits, and their privacy budgets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.facts.known import Known
from coordinator.storage.view_store import Delivery
from fedcg.wire.messages.schemas import DeviceCondition, DoctorFinding

ENROL_AGAIN = "`fedcg token create --replaces DEVICE` here, then `fedcg enrol` on the device into a new folder."
LOOK = "On the device: `fedcg doctor` names what is wrong and what to do."
FINDINGS = {
    ("clock", "failed"): (
        "its clock is outside the life of its certificate",
        "On the device: `timedatectl set-ntp true`.",
    ),
    ("disk", "failed"): (
        "less than 1 GiB is free at its store",
        "On the device: make room at the `store` of agent.toml.",
    ),
    ("keys", "warning"): (
        "other users of the device can read its keys",
        "On the device: `chmod 600` what `fedcg doctor` names.",
    ),
    ("keys", "failed"): ("its keys can't be read", ENROL_AGAIN),
    ("certificate", "warning"): (
        "its certificate ends soon, or it has none",
        "On the device: `fedcg agent renew` prints why.",
    ),
    ("certificate", "failed"): ("its certificate can't be used", ENROL_AGAIN),
    ("data", "warning"): (
        "some of its images can't be decoded or lie outside the folders of classes, all are of one class, or a class has one image",
        LOOK,
    ),
    ("data", "failed"): ("it finds no images in folders of classes, or can't read some", LOOK),
    ("cohort secret", "warning"): (
        "it has no cohort secret: the start of its private networks can be computed from the spec",
        "`fedcg cohort create` on the first device, `fedcg cohort join` on the others; after the first round they print the way.",
    ),
    ("cohort secret", "failed"): ("its cohort secret can't be read", LOOK),
    ("training", "failed"): (
        "it can't train: a package, memory, weights, or what [training] asks for is missing",
        LOOK,
    ),
}
"""Sentence and remedy by check and state."""
PAUSED = ("its owner has paused it", "Nothing is broken. On the device: `fedcg agent resume` ends the pause.")
AUDIT_TITLES = {
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
"""What each figure of a device's audit is."""


@dataclass(frozen=True)
class Finding:
    """What a device's own doctor found: "warning" or "failed", the fact, and the remedy; `at` is when the report with it came, unix time."""

    state: str
    what: str
    remedy: str
    at: float


def doctor_findings(known: Known, device: str) -> list[Finding] | None:
    """What a device's own doctor found, as its agents reported it, what failed first; None where it reports none."""
    found: dict[DoctorFinding | str, Finding] = {}
    is_reported = False
    for federation in known.store.federations():
        for record in known.store.presence.conditions(federation.id, device):
            condition = DeviceCondition.model_validate_json(record.content)
            is_reported |= condition.findings is not None or condition.paused is not None
            if condition.paused:
                found[federation.id] = Finding("warning", *PAUSED, record.at)
            for one in condition.findings or ():
                fallback = (f"its check of {one.check}: {one.state}", LOOK)
                found[one] = Finding(one.state, *FINDINGS.get((one.check, one.state), fallback), record.at)
    return sorted(found.values(), key=lambda one: one.state) if is_reported else None


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
    gains = [(AUDIT_TITLES[name], float(found[name])) for name in AUDIT_TITLES if name in found]
    spent = _in_words(last.report.get("epsilon"))
    return ReportedPrivacy(last.round, gains, spent) if gains or spent else None


def _in_words(spent: Mapping[str, Any] | None) -> str:
    if not spent:
        return ""
    budget = "" if spent.get("budget") is None else f" of {spent['budget']:g}"
    return f"epsilon {spent['epsilon']:.3g}{budget} at delta {spent['delta']:g}"
