"""The firewall: the only place where an update for the wire is made and where its content is decided.

Parts must be allowed by this device's own policy AND asked for by the spec; tensor names, element types and shapes come
from the spec's layouts, never from the tensors that a method returned. Everything is copied, so no hidden view leaves the device.
Torch-free.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import field

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from edge_client.config import PolicySection
from edge_client.errors import FirewallError
from fedcg.learning.errors import LearningError
from fedcg.learning.registry import method_names
from fedcg.learning.spec import FederationSpec, NetworkChoice
from fedcg.learning.split_names import check_name, pinned_weights
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, pack, read_header
from fedcg.wire.artifacts.payload import Array, PartArrays, beyond
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import VOLUNTARY_REPORT, Part, Report, ReportField, TensorLayout
from fedcg.wire.sealed_numbers import number_count, to_numbers

# The facts about the device in an update's header, with the form of each value. A bit-exact repetition of the round needs them.
FACTS = {
    "batch_size": r"\d{0,9}",
    "cpu": r"[ -~]{0,120}",
    "device": r"cpu|cuda",
    "fedcg-edge": r"[0-9A-Za-z.+]{1,40}",
    "most_rows": r"\d{1,9}",
    "program": r"[0-9a-f]{64}",
    "threads": r"\d{1,5}",
    "torch": r"[0-9A-Za-z.+]{1,40}",
}
Seal = Callable[[npt.NDArray[np.uint32]], npt.NDArray[np.uint32]]
_BOUNDS = {"epochs": "max_epochs", "steps": "max_steps", "batch_size": "max_batch"}
"""Parameters of a spec, and the policy setting that bounds each. `max_steps` bounds all other numbers of a method."""
_OF_SERVER = "server_"
"""Prefix of parameters that only cost the coordinator time."""


class Sealing(Value):
    """A device's part in the sealed sum of a round.

    Attributes:
        share: weight of its numbers in the sum.
        seal: masks numbers [size] uint32.
    """

    share: float
    seal: Seal


class UpdateFacts(Value):
    """The fields of an update's header besides method and federation.

    Attributes:
        versions, determinism: the facts that a bit-exact repetition needs.
    """

    device: str
    round: int
    attempt: int
    versions: dict[str, str] = field(default_factory=dict)
    determinism: dict[str, str] = field(default_factory=dict)


def check_spec(
    spec: FederationSpec, policy: PolicySection, network: NetworkChoice | None = None
) -> tuple[DeclineReason, str] | None:
    """Check whether this device accepts a spec: None, or the decline reason and a text for its owner.

    A spec's split names code, so only splits that the owner installed or allowed are accepted.

    Args:
        spec: of the federation.
        policy: of this device.
        network: with this device's own backbone; None: the spec's network.
    """
    try:
        if spec.method not in (known := method_names()):
            problem = f"method {spec.method} is not installed here (there are {', '.join(known)}); update the agent"
            return DeclineReason.UNKNOWN_METHOD, problem
        if asked := beyond_policy(spec, policy):
            return asked[0][0], "; ".join(text for _, text in asked)
        own = network or spec.network
        check_name(own.split)
        if own.weights is not None:
            pinned_weights(own.weights)
    except LearningError as error:
        return DeclineReason.SPEC_REFUSED, str(error)
    if not all(spec.layouts.get(part) for part in spec.upload):
        return DeclineReason.SPEC_REFUSED, "the spec asks for a part without listing its tensors"
    return None


def beyond_policy(spec: FederationSpec, policy: PolicySection) -> tuple[tuple[DeclineReason, str], ...]:
    """Everything that a spec asks for beyond a policy: decline reasons with texts. An approval admits all of it."""
    found = [(DeclineReason.NEEDS_APPROVAL, text) for text in unlisted(spec, policy).values()]
    if forbidden := frozenset(spec.upload) - policy.allow_upload:
        parts = "; ".join(f"{part.value} ({spec.meaning_of(part)})" for part in sorted(forbidden))
        problem = f"the spec asks for what policy.allow_upload of this device does not list: {parts}"
        found.append((DeclineReason.UPLOAD_NOT_ALLOWED, problem))
    if kept := spec.required_report - policy.allow_report:
        fields = ", ".join(sorted(name.value for name in kept))
        problem = f"method {spec.method} needs {fields}, which policy.allow_report of this device does not list"
        found.append((DeclineReason.REPORT_NOT_ALLOWED, problem))
    return *found, *((DeclineReason.NEEDS_APPROVAL, text) for text in excesses(spec, policy).values())


def widened(policy: PolicySection, spec: FederationSpec) -> PolicySection:
    """The policy, widened for one spec that the owner approved: its parts, the report fields its method needs, and its work per round."""
    bounds = {bound: getattr(policy, bound) for bound in _BOUNDS.values()}
    for name, bound in _bounded(spec).items():
        bounds[bound] = max(bounds[bound], spec.params[name])
    return policy.model_copy(
        update={
            "federations": frozenset(),
            "methods": frozenset(),
            "allow_upload": policy.allow_upload | frozenset(spec.upload),
            "allow_report": policy.allow_report | spec.required_report,
            **bounds,
        }
    )


def unlisted(spec: FederationSpec, policy: PolicySection) -> dict[str, str]:
    """The policy lists (federations, methods) that lack the spec's value, with a text for each."""
    named = (("federations", spec.federation, policy.federations), ("methods", spec.method, policy.methods))
    return {
        name: f"policy.{name} of this device does not list {value}"
        for name, value, listed in named
        if listed and value not in listed
    }


def excesses(spec: FederationSpec, policy: PolicySection) -> dict[str, str]:
    """The spec parameters that exceed this device's policy, with a text for each. A method's own defaults are modest."""
    found: dict[str, str] = {}
    for name, bound in _bounded(spec).items():
        value, most = spec.params[name], getattr(policy, bound)
        if value > most and not (name == "epochs" and spec.params.get("steps")):
            found[name] = f"the spec asks for {name} = {value}; policy.{bound} of this device is {most}"
    return found


def _bounded(spec: FederationSpec) -> dict[str, str]:
    """The policy setting that bounds each numeric parameter of a spec."""
    numbers = [name for name, value in spec.params.items() if type(value) in (int, float)]
    return {name: _BOUNDS.get(name, "max_steps") for name in sorted(numbers) if not name.startswith(_OF_SERVER)}


def build_update(
    shared: PartArrays,
    report: Report,
    *,
    spec: FederationSpec,
    policy: PolicySection,
    facts: UpdateFacts,
    base: Base,
    sealing: Sealing | None = None,
) -> bytes:
    """Pack the update of one local round.

    Args:
        shared: the parts that the method shares in this round, including sealed ones.
        report: fields that the policy or the spec does not allow are removed.
        spec: the federation's spec.
        policy: the limits of this device.
        facts: the rest of the header.
        base: the aggregate that the round started from; a delta codec needs the parts of `spec.with_base`.
        sealing: masks the numbers of sealed parts. None: they stay here, and the update has zeros that are not counted.

    Raises:
        FirewallError: a part or tensor that may not leave, is missing, of another element type or shape, or not finite;
            or a report field that the method needs and the policy forbids.
        CodecError: a number that the spec's codec, or a sealed sum, can't hold.
    """
    _check_parts(frozenset(shared), spec, policy, facts)
    _check_facts(facts)
    parts = {part: _checked_part(part, shared[part], spec.layouts[part], facts.device) for part in sorted(shared)}
    if kept := spec.sealed_in(facts.round):
        inside = {part: parts.pop(part) for part in kept}
        parts[Part.SEALED] = _sealed(inside, spec, sealing)
    header = ArtifactHeader(
        kind="update",
        method=spec.method,
        federation=spec.federation,
        round=facts.round,
        attempt=facts.attempt,
        client=facts.device,
        base=base.id,
        report=_allowed_report(report, spec, policy, facts.device),
        versions=facts.versions,
        determinism=facts.determinism,
    )
    delta_base = Base(base.id, {part: base.parts[part] for part in spec.with_base}) if spec.with_base else None
    return pack(header, parts, spec.codec, delta_base)


def _check_facts(facts: UpdateFacts) -> None:
    for name, value in sorted([*facts.versions.items(), *facts.determinism.items()]):
        if name not in FACTS:
            raise FirewallError(facts.device, "not an allowed header field of an update", tensor=name)
        if not re.fullmatch(FACTS[name], value):
            raise FirewallError(facts.device, f"its value is not of the form {FACTS[name]}", tensor=name)


def check_kept(data: bytes, policy: PolicySection, device: str) -> None:
    """Check a stored update against the current policy, which may have become stricter since.

    Raises:
        FirewallError: it contains a part or report field that may no longer leave, or is not an update.
    """
    try:
        header = read_header(data)
    except WireError as error:
        raise FirewallError(device, f"the file in the outbox is not an update: {error}") from error
    allowed = {part.value for part in policy.allow_upload}
    for name in sorted({key.partition("/")[0] for key in header.codecs} - allowed):
        raise FirewallError(device, "policy.allow_upload of this device no longer lists it", part=name)
    reported = frozenset() if header.report is None else header.report.fields()
    for field_name in sorted(reported - policy.allow_report):
        problem = "policy.allow_report of this device no longer lists it"
        raise FirewallError(device, problem, tensor=field_name.value)


def _check_parts(parts: frozenset[Part], spec: FederationSpec, policy: PolicySection, facts: UpdateFacts) -> None:
    wanted = spec.shared_in(facts.round)
    for part in sorted(parts):
        carrier = Part.SEALED if part in spec.sealed else part
        if carrier not in policy.allow_upload:
            raise FirewallError(facts.device, "policy.allow_upload of this device does not list it", part=carrier)
        if part not in wanted:
            raise FirewallError(facts.device, "the spec does not ask for it", part=part)
    for part in sorted(wanted - parts):
        raise FirewallError(facts.device, "the spec asks for it, but the local round did not return it", part=part)


def _checked_part(
    part: Part, tensors: Mapping[str, Array], layouts: tuple[TensorLayout, ...], device: str
) -> dict[str, Array]:
    expected = {layout.name: layout for layout in layouts}
    for name in sorted(tensors.keys() - expected.keys()):
        raise FirewallError(device, "the spec's layout has no such tensor", part=part, tensor=name)
    for name in sorted(expected.keys() - tensors.keys()):
        raise FirewallError(device, "the tensor is missing", part=part, tensor=name)
    for name, layout in expected.items():
        if problem := _problem_of(tensors[name], layout):
            raise FirewallError(device, problem, part=part, tensor=name)
    return {name: tensors[name].copy(order="C") for name in sorted(tensors)}


def _sealed(parts: PartArrays, spec: FederationSpec, sealing: Sealing | None) -> dict[str, Array]:
    """The masked numbers of sealed parts, or zeros."""
    if sealing is None:
        return {part.value: np.zeros(number_count(spec.layouts[part]), np.uint32) for part in parts}
    assert spec.sealed_range is not None
    each = [to_numbers(parts[part], spec.layouts[part], spec.sealed_range, sealing.share) for part in sorted(parts)]
    behind = np.split(sealing.seal(np.concatenate(each)), np.cumsum([len(one) for one in each])[:-1])
    return {part.value: one for part, one in zip(sorted(parts), behind, strict=True)}


def _problem_of(tensor: Array, layout: TensorLayout) -> str:
    """Why a tensor may not leave; empty if it may."""
    if type(tensor) is not np.ndarray:  # a subclass may carry extra data
        return f"{type(tensor).__name__} instead of a plain array"
    if tensor.dtype != np.dtype(layout.dtype):
        return f"element type {tensor.dtype} instead of {layout.dtype}"
    if tensor.shape != layout.shape:
        return f"shape {tensor.shape} instead of {layout.shape}"
    return beyond(tensor, layout) if np.isfinite(tensor).all() else "it contains NaN or infinity"


def _allowed_report(report: Report, spec: FederationSpec, policy: PolicySection, device: str) -> Report:
    if type(report) is not Report:
        raise FirewallError(device, f"{type(report).__name__} instead of a plain report")
    for name in sorted(spec.required_report):
        if name not in policy.allow_report:
            problem = f"method {spec.method} needs this report field, but policy.allow_report does not list it"
            raise FirewallError(device, problem, tensor=name.value)
        if name not in report.fields():
            raise FirewallError(device, f"method {spec.method} needs this report field", tensor=name.value)
    try:
        allowed = report.only(report.fields() & policy.allow_report & (frozenset(spec.report) | VOLUNTARY_REPORT))
    except ValidationError as error:  # constructed without validation
        field_name = ".".join(str(step) for step in error.errors()[0]["loc"])
        raise FirewallError(device, "its value is not valid for this report field", tensor=field_name) from error
    if allowed.per_class is not None and not allowed.per_class.fits(len(spec.classes)):
        raise FirewallError(device, f"not of {len(spec.classes)} classes", tensor=ReportField.PER_CLASS.value)
    counts, examples = allowed.label_counts, allowed.examples
    if counts is not None and (len(counts) != len(spec.classes) or sum(counts) != (examples or sum(counts))):
        problem = f"{len(counts)} numbers that add up to {sum(counts)}, for {len(spec.classes)} classes and {examples} examples"
        raise FirewallError(device, problem, tensor=ReportField.LABEL_COUNTS.value)
    return allowed
