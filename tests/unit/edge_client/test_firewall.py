"""The firewall: what leaves is exactly what policy and spec both name, and a spec that asks for more work than the policy allows is declined."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.config import PolicySection
from edge_client.errors import FirewallError
from edge_client.firewall import Sealing, UpdateFacts, build_update, check_kept, check_spec
from fedcg.learning.networks.plans import on_wire
from fedcg.learning.spec import FederationSpec, NetworkChoice
from fedcg.wire.artifacts.artifacts import Base, codecs_for, unpack
from fedcg.wire.artifacts.inspection import inspect
from fedcg.wire.artifacts.payload import Array, assert_within
from fedcg.wire.errors import CodecError, IntegrityError
from fedcg.wire.messages.schemas import EVERYONE, Accept, ArtifactRef, Decline, DeclineReason, Need, Offer
from fedcg.wire.parts import (
    DEFAULT_ALLOW_REPORT,
    VOLUNTARY_REPORT,
    AuditFigure,
    ClassAccuracies,
    Health,
    Part,
    PrivacySpent,
    Report,
    ReportField,
    RoundCost,
    TensorLayout,
)
from fedcg.wire.sealed_numbers import number_count, to_numbers
from tests.support.edge.world import DEVICE, LAYOUTS, MakeWorld, connected, toy_parts, toy_spec
from tests.support.present import present
from tests.support.waiting import wait_until

SHARED = (Part.CLASSIFIER, Part.GENERATOR)
FACTS = UpdateFacts(DEVICE, 3, 2, {"torch": "2.13.0"}, {"threads": "1"})
BASE_ID = "b" * 64
PER_CLASS = ClassAccuracies(accuracy=(0.5, None, 1.0), shadow=(0.25, None, 1.0))
GAINS: dict[AuditFigure, float] = {"label_l1": 0.04, "reid": -0.01}
SPENT = PrivacySpent(epsilon=3.2, delta=1e-5, budget=8.0)
REPORT = Report(
    examples=12,
    accuracy=0.5,
    loss=0.7,
    health=Health.OK,
    label_counts=(4, 4, 4),
    shadow=0.4,
    downloaded=0.3,
    per_class=PER_CLASS,
    audit=GAINS,
    epsilon=SPENT,
    cost=RoundCost(seconds=83.0, joules=415.2),
)
EVERYTHING = PolicySection(allow_upload=frozenset(Part), allow_report=frozenset(ReportField))
COUNTED: dict[str, Any] = {
    "upload": (Part.STATISTICS,),
    "layouts": {Part.STATISTICS: (TensorLayout(name="held", dtype="int64", shape=(2,)),)},
}
Parts = dict[Part, dict[str, Array]]


def built(
    shared: Parts | None = None,
    report: Report = REPORT,
    spec: FederationSpec | None = None,
    policy: PolicySection | None = None,
    sealing: Sealing | None = None,
) -> bytes:
    return build_update(
        toy_parts(1, SHARED) if shared is None else shared,
        report,
        spec=spec or toy_spec(),
        policy=policy or PolicySection(),
        facts=FACTS,
        base=Base(BASE_ID, {}),
        sealing=sealing,
    )


def reports_of(policies: tuple[PolicySection, ...], spec: FederationSpec | None = None) -> list[Report]:
    """What leaves of `REPORT` under each of the policies."""
    layouts = {part: LAYOUTS[part] for part in SHARED}
    headers = [unpack(built(spec=spec, policy=policy), layouts).header for policy in policies]
    return [header.report for header in headers if header.report is not None]


def test_the_update_holds_the_shared_parts_and_a_header_that_says_what_it_is() -> None:
    shared = toy_parts(1, SHARED)
    artifact = unpack(built(shared), {part: LAYOUTS[part] for part in SHARED})
    header = artifact.header
    assert (header.kind, header.method, header.federation, header.client) == ("update", "fedcg", "shapes", DEVICE)
    assert (header.round, header.attempt, header.base) == (3, 2, BASE_ID)
    assert (header.versions, header.determinism) == ({"torch": "2.13.0"}, {"threads": "1"})
    for part in SHARED:
        for name, tensor in shared[part].items():
            assert np.array_equal(artifact.parts[part][name], tensor)


def test_an_update_made_earlier_is_judged_by_the_policy_of_now() -> None:
    kept = built()
    check_kept(kept, PolicySection(), DEVICE)
    with pytest.raises(FirewallError, match="allow_upload") as caught:
        check_kept(kept, PolicySection(allow_upload=frozenset({Part.GENERATOR})), DEVICE)
    assert caught.value.part == "classifier"
    with pytest.raises(FirewallError, match="allow_report") as caught:
        check_kept(kept, PolicySection(allow_report=DEFAULT_ALLOW_REPORT - {ReportField.EXAMPLES}), DEVICE)
    assert caught.value.tensor == "examples"
    with pytest.raises(FirewallError, match="not an update"):
        check_kept(b"anything", EVERYTHING, DEVICE)


PRIVATE = {**toy_parts(1), Part.DISCRIMINATOR: toy_parts(1)[Part.EXTRACTOR]}
WITH_EXTRACTOR, WITH_DISCRIMINATOR = (*SHARED, Part.EXTRACTOR), (*SHARED, Part.DISCRIMINATOR)
LONGER = {**LAYOUTS, Part.DISCRIMINATOR: LAYOUTS[Part.EXTRACTOR]}


@pytest.mark.parametrize(
    ("offered", "asked", "policy", "why", "part"),
    [
        (WITH_EXTRACTOR, WITH_EXTRACTOR, PolicySection(), "allow_upload", "extractor"),
        (WITH_DISCRIMINATOR, WITH_DISCRIMINATOR, PolicySection(), "allow_upload", "discriminator"),
        (WITH_EXTRACTOR, SHARED, EVERYTHING, "does not ask", "extractor"),
        (SHARED, SHARED, PolicySection(allow_upload=frozenset({Part.CLASSIFIER})), "allow_upload", "generator"),
        ((Part.CLASSIFIER,), SHARED, PolicySection(), "did not return", "generator"),
    ],
)
def test_a_part_leaves_only_when_policy_and_spec_both_name_it_and_none_is_missing(
    offered: tuple[Part, ...], asked: tuple[Part, ...], policy: PolicySection, why: str, part: str
) -> None:
    with pytest.raises(FirewallError, match=why) as caught:
        built({one: PRIVATE[one] for one in offered}, spec=toy_spec(upload=asked, layouts=LONGER), policy=policy)
    assert (caught.value.device, caught.value.part) == (DEVICE, part)


def test_a_missing_tensor_and_infinity_are_refused_by_name() -> None:
    shared = toy_parts(1, SHARED)
    shared[Part.GENERATOR]["weight"][0, 0] = -np.inf
    with pytest.raises(FirewallError, match="NaN or infinity") as caught:
        built(shared)
    assert (caught.value.part, caught.value.tensor) == ("generator", "weight")
    del shared[Part.GENERATOR]["weight"]
    with pytest.raises(FirewallError, match="missing") as caught:
        built(shared)
    assert (caught.value.part, caught.value.tensor) == ("generator", "weight")


def test_label_counts_leave_only_when_the_owner_allows_them() -> None:
    wants = toy_spec(report=(ReportField.EXAMPLES, ReportField.LABEL_COUNTS))
    with pytest.raises(FirewallError, match="label_counts"):
        built(spec=wants)
    allowed = PolicySection(allow_report=DEFAULT_ALLOW_REPORT | {ReportField.LABEL_COUNTS})
    assert reports_of((allowed,), wants) == [Report(examples=12, label_counts=(4, 4, 4))]


def test_accuracies_by_class_leave_only_with_the_owners_word_and_one_number_for_each_class() -> None:
    told = reports_of((PolicySection(), EVERYTHING))
    assert [(one.downloaded, one.per_class) for one in told] == [(None, None), (0.3, PER_CLASS)]
    longer = REPORT.model_copy(update={"per_class": ClassAccuracies(downloaded=(0.5, 0.5, 0.5, 0.5))})
    with pytest.raises(FirewallError, match="not of 3 classes") as caught:
        built(report=longer, policy=EVERYTHING)
    assert caught.value.tensor == "per_class"


def test_figures_of_the_audit_and_spent_privacy_leave_only_with_the_owners_word_and_by_known_names() -> None:
    told = reports_of((PolicySection(), EVERYTHING))
    assert [(one.audit, one.epsilon) for one in told] == [(None, None), (GAINS, SPENT)]
    kept = built(policy=EVERYTHING)
    check_kept(kept, EVERYTHING, DEVICE)
    stricter = PolicySection(allow_report=frozenset(ReportField) - {ReportField.AUDIT})
    with pytest.raises(FirewallError, match="audit"):
        check_kept(kept, stricter, DEVICE)
    for strange in ({"face_of_anna": 0.5}, {"reid": float("nan")}, {"reid": 1e9}):
        with pytest.raises(FirewallError, match="audit"):
            built(report=REPORT.model_copy(update={"audit": strange}), policy=EVERYTHING)


def test_a_report_without_the_later_fields_has_the_bytes_of_before() -> None:
    assert not {"audit", "epsilon", "cost"} & Report(examples=3).model_dump().keys()


def test_optional_label_counts_stay_on_a_device_that_does_not_allow_them_and_it_takes_part_all_the_same() -> None:
    wants = toy_spec(report=(ReportField.EXAMPLES, ReportField.LABEL_COUNTS))
    wants = wants.model_copy(update={"optional_report": (ReportField.LABEL_COUNTS,)})
    assert check_spec(wants, PolicySection()) is None
    assert [one.label_counts for one in reports_of((PolicySection(), EVERYTHING), wants)] == [None, (4, 4, 4)]
    still_needed = PolicySection(allow_report=frozenset({ReportField.LABEL_COUNTS}))
    assert (check_spec(wants, still_needed) or ())[:1] == (DeclineReason.REPORT_NOT_ALLOWED,)


def test_a_report_without_what_the_method_needs_is_refused() -> None:
    with pytest.raises(FirewallError, match="examples"):
        built(report=Report(accuracy=0.5))


@pytest.mark.parametrize(
    ("changes", "policy", "reason", "said"),
    [
        ({}, PolicySection(), None, ""),
        ({"upload": tuple(LAYOUTS)}, PolicySection(), DeclineReason.UPLOAD_NOT_ALLOWED, "extractor"),
        ({"upload": tuple(LAYOUTS)}, EVERYTHING, None, ""),
        (COUNTED, PolicySection(), DeclineReason.UPLOAD_NOT_ALLOWED, "statistics (numbers computed from the images"),
        ({"report": tuple(ReportField)}, PolicySection(), DeclineReason.REPORT_NOT_ALLOWED, "label_counts"),
        ({}, PolicySection(allow_report=frozenset()), DeclineReason.REPORT_NOT_ALLOWED, "examples"),
        ({"method": "telepathy"}, PolicySection(), DeclineReason.UNKNOWN_METHOD, "telepathy"),
        ({"upload": (Part.DISCRIMINATOR,)}, EVERYTHING, DeclineReason.SPEC_REFUSED, "tensors"),
        ({}, PolicySection(methods=frozenset({"fedavg"})), DeclineReason.NEEDS_APPROVAL, "does not list fedcg"),
        ({}, PolicySection(federations=frozenset({"other"})), DeclineReason.NEEDS_APPROVAL, "does not list shapes"),
        ({"params": {"epochs": 200}}, PolicySection(), None, ""),
        ({"params": {"epochs": 201}}, PolicySection(), DeclineReason.NEEDS_APPROVAL, "max_epochs of this device is"),
        ({"params": {"epochs": 1e9}}, PolicySection(), DeclineReason.NEEDS_APPROVAL, "epochs = 1000000000.0; policy."),
        ({"params": {"epochs": 20}}, PolicySection(max_epochs=19), DeclineReason.NEEDS_APPROVAL, "policy.max_epochs"),
        ({"params": {"steps": 100_000}}, PolicySection(), None, ""),
        ({"params": {"steps": 20, "epochs": 10**9}}, PolicySection(), None, ""),
        ({"params": {"steps": 10**9, "epochs": 1}}, PolicySection(), DeclineReason.NEEDS_APPROVAL, "policy.max_steps"),
        ({"params": {"align_steps": 10**9}}, PolicySection(), DeclineReason.NEEDS_APPROVAL, "policy.max_steps"),
        ({"params": {"batch_size": 10**9}}, PolicySection(), DeclineReason.NEEDS_APPROVAL, "policy.max_batch"),
    ],
)
def test_a_spec_is_judged_by_the_owners_policy_with_a_reason_to_tell(
    changes: dict[str, Any], policy: PolicySection, reason: DeclineReason | None, said: str
) -> None:
    refusal = check_spec(toy_spec(**changes), policy)
    assert (None if refusal is None else refusal[0]) is reason
    assert refusal is None or said in refusal[1]


def test_a_spec_that_names_code_nobody_installed_or_allowed_here_is_refused_and_nothing_is_imported() -> None:
    spec = toy_spec().model_copy(update={"network": NetworkChoice(split="antigravity:geohash")})
    refusal = present(check_spec(spec, EVERYTHING))
    assert refusal[0] is DeclineReason.SPEC_REFUSED
    assert "antigravity:geohash is not allowed" in refusal[1]
    assert "antigravity" not in sys.modules


parts_sets = st.sets(st.sampled_from(Part)).map(frozenset)
plain_sets = parts_sets.map(lambda parts: parts - {Part.SEALED})
# `model` belongs to a device's report of itself, not to an update's.
OF_UPDATES = sorted(set(ReportField) - {ReportField.MODEL, ReportField.TELEMETRY})
field_sets = st.sets(st.sampled_from(OF_UPDATES)).map(frozenset)


@settings(max_examples=200, deadline=None)
@given(
    offered=plain_sets,
    asked=plain_sets,
    sealing=plain_sets,
    allowed=parts_sets,
    told=field_sets,
    wanted=field_sets,
    permitted=field_sets,
)
def test_nothing_leaves_that_is_not_asked_for_and_allowed(
    offered: frozenset[Part],
    asked: frozenset[Part],
    sealing: frozenset[Part],
    allowed: frozenset[Part],
    told: frozenset[ReportField],
    wanted: frozenset[ReportField],
    permitted: frozenset[ReportField],
) -> None:
    sealed, leaving = asked & sealing, on_wire(asked, asked & sealing)
    layouts = {part: LAYOUTS.get(part, LAYOUTS[Part.EXTRACTOR]) for part in Part}
    layouts[Part.SEALED] = tuple(
        TensorLayout(name=part.value, dtype="uint32", shape=(number_count(layouts[part]),)) for part in sorted(sealed)
    )
    tensors = {part: toy_parts(1).get(part, toy_parts(2)[Part.EXTRACTOR]) for part in Part}
    spec = toy_spec(upload=tuple(sorted(leaving)), report=tuple(sorted(wanted)), layouts=layouts)
    spec = spec.model_copy(update={"sealed": tuple(sorted(sealed)), "sealed_range": 8.0})
    policy = PolicySection(allow_upload=allowed, allow_report=permitted)
    try:
        data = built({part: tensors[part] for part in offered}, REPORT.only(told), spec, policy)
    except FirewallError:
        needed = {ReportField.EXAMPLES, ReportField.LABEL_COUNTS} & wanted
        assert offered != asked or not leaving <= allowed or not needed <= permitted & told
        return
    seen = inspect(data)
    assert offered == asked
    assert {name.split("/")[0] for name in seen.tensors} == {part.value for part in leaving & allowed}
    header = unpack(data, dict(spec.update_layouts(FACTS.round))).header
    assert present(header.report).fields() == told & (wanted | VOLUNTARY_REPORT) & permitted


def test_an_update_is_coded_after_it_was_checked_and_against_the_aggregate_of_the_round() -> None:
    layouts = {part: (TensorLayout(name="weight", dtype="float32", shape=(4, 20)),) for part in SHARED}
    spec = toy_spec().model_copy(update={"layouts": layouts, "codec": "i8-delta", "with_base": (Part.CLASSIFIER,)})
    random = np.random.default_rng(3)
    shared: Parts = {part: {"weight": random.standard_normal((4, 20), dtype=np.float32)} for part in SHARED}
    base: Parts = {part: {"weight": tensors["weight"] + np.float32(0.01)} for part, tensors in shared.items()}

    known = Base(BASE_ID, base)

    def build(parts: Parts) -> bytes:
        return build_update(parts, REPORT, spec=spec, policy=PolicySection(), facts=FACTS, base=known)

    data = build(shared)
    artifact = unpack(data, layouts, codecs=codecs_for(layouts, "i8-delta", {Part.CLASSIFIER}), base=known)
    np.testing.assert_allclose(
        artifact.parts[Part.CLASSIFIER]["weight"], shared[Part.CLASSIFIER]["weight"], atol=0.01 / 127
    )
    check_kept(data, PolicySection(), DEVICE)
    with pytest.raises(FirewallError, match="allow_upload"):
        check_kept(data, PolicySection(allow_upload=frozenset({Part.GENERATOR})), DEVICE)
    with pytest.raises(FirewallError, match="NaN"):
        build({**shared, Part.GENERATOR: {"weight": np.full((4, 20), np.nan, np.float32)}})


def test_numbers_that_the_codec_can_not_hold_never_leave_as_infinity() -> None:
    layouts = {part: (TensorLayout(name="weight", dtype="float32", shape=(4, 20)),) for part in SHARED}
    spec = toy_spec(layouts=layouts).model_copy(update={"codec": "f16"})
    huge: Parts = {part: {"weight": np.full((4, 20), 1e5, np.float32)} for part in SHARED}
    with pytest.raises(CodecError, match="classifier/weight"):
        built(huge, spec=spec)


def test_numbers_beyond_the_bounds_of_their_layout_do_not_leave_and_are_rejected_where_they_arrive() -> None:
    layout = TensorLayout(name="held", dtype="float32", shape=(2,), low=0.0, high=1.0)
    spec = toy_spec(upload=(Part.STATISTICS,), layouts={Part.STATISTICS: (layout,)})
    for values, problem in (
        ([0.0, 1.0], ""),
        ([0.5, 1.5], "it holds 1.5, above 1"),
        ([-0.5, 1.0], "it holds -0.5, below 0"),
    ):
        shared: Parts = {Part.STATISTICS: {"held": np.array(values, dtype=np.float32)}}
        if not problem:
            assert_within(unpack(built(shared, spec=spec, policy=EVERYTHING), dict(spec.layouts)).parts, spec.layouts)
            continue
        with pytest.raises(FirewallError, match=problem) as caught:
            built(shared, spec=spec, policy=EVERYTHING)
        assert (caught.value.part, caught.value.tensor) == ("statistics", "held")
        with pytest.raises(IntegrityError, match=f"statistics/held: {problem}"):
            assert_within(shared, spec.layouts)


SEALED_EXTRACTOR = TensorLayout(name="extractor", dtype="uint32", shape=(number_count(LAYOUTS[Part.EXTRACTOR]),))


def test_a_sealed_part_leaves_only_as_numbers_behind_masks_and_without_masks_as_zeros() -> None:
    plain = toy_spec(upload=(Part.CLASSIFIER, Part.SEALED), layouts={**LAYOUTS, Part.SEALED: (SEALED_EXTRACTOR,)})
    spec = plain.model_copy(update={"sealed": (Part.EXTRACTOR,), "sealed_range": 8.0})
    shared = toy_parts(1, (Part.CLASSIFIER, Part.EXTRACTOR))
    policy = PolicySection(allow_upload=frozenset({Part.CLASSIFIER, Part.SEALED}))

    def left(sealing: Sealing | None) -> Array:
        packed = built(shared, spec=spec, policy=policy, sealing=sealing)
        assert {name.split("/")[0] for name in inspect(packed).tensors} == {"classifier", "sealed"}
        parts = unpack(packed, dict(spec.update_layouts(FACTS.round))).parts
        assert_within(parts, spec.update_layouts(FACTS.round))
        return parts[Part.SEALED]["extractor"]

    masks = np.random.default_rng(0).integers(0, 1 << 32, SEALED_EXTRACTOR.shape, dtype=np.uint32)
    bare = to_numbers(shared[Part.EXTRACTOR], LAYOUTS[Part.EXTRACTOR], 8.0, 0.25)
    assert bare[0] == 1 << 25
    assert np.array_equal(left(Sealing(0.25, masks.__add__)), bare + masks), "modulo 2^32"
    assert not left(None).any()
    refused = present(check_spec(spec, PolicySection()))
    assert "sealed (extractor as parts behind masks: the coordinator can't read them" in refused[1]
    with pytest.raises(FirewallError, match="allow_upload") as caught:
        built(shared, spec=spec, policy=PolicySection(allow_upload=frozenset(Part) - {Part.SEALED}))
    assert caught.value.part == "sealed"
    shared[Part.EXTRACTOR]["weight"][0, 0] = 9.0
    with pytest.raises(CodecError, match="tensor weight holds numbers outside -8 to 8, which a sealed sum can't hold"):
        left(Sealing(0.25, masks.__add__))


def test_an_aggregate_above_the_bound_is_declined_and_no_byte_of_it_is_asked_for(make_world: MakeWorld) -> None:
    world = connected(make_world)
    coordinator = world.coordinator
    coordinator.publish(
        coordinator.topics.offer,
        Offer(
            **coordinator.address(EVERYONE, 1, 1),
            spec=coordinator.serve(world.spec.canonical()),
            aggregate=ArtifactRef(id="a" * 64, size=512 * 1024 * 1024, chunk_bytes=120 * 1024),
            rounds=2,
            deadline_at=0.0,
        ),
        retain=True,
    )
    coordinator.invite(1)
    assert coordinator.wait(Decline).reason is DeclineReason.SPEC_REFUSED
    wait_until(lambda: bool(world.events("declined")), "the decline is recorded")
    assert "policy.max_download_mb of this device is 128" in str(world.events("refused")[0]["detail"])
    assert not any(isinstance(message, Accept | Need) for message in coordinator.heard)
