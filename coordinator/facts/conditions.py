"""What devices reported of themselves: the findings of their own doctors as sentences with remedies, and the exported models in use."""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.facts.known import Known
from fedcg.wire.messages.conditions import DeviceCondition, DoctorFinding, ServedModel

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


@dataclass(frozen=True)
class Finding:
    """What a device's own doctor found: "warning" or "failed", the fact, and the remedy; `at` is when the report with it came, unix time."""

    state: str
    what: str
    remedy: str
    at: float


@dataclass(frozen=True)
class ServedAt:
    """The exported model that a device uses; `at` is when the report came, unix time, `gain` the accuracy less that of the model before it."""

    device: str
    at: float
    model: ServedModel
    gain: float | None


def served_models(known: Known, federation: str) -> list[ServedAt]:
    """The exported models in use, by device, of the members that report them.

    Raises:
        NotFoundError: there is no such federation.
    """
    members, found = {device.id for device in known.store.members()}, []
    for record in known.store.presence.conditions(known.federation(federation).id):
        model = DeviceCondition.model_validate_json(record.content).model
        if model is not None and record.device in members:
            both = model.accuracy, model.before
            gain = None if both[0] is None or both[1] is None else both[0] - both[1]
            found.append(ServedAt(record.device, record.at, model, gain))
    return found


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
