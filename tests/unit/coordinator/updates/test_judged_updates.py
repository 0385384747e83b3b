"""Updates judged: coded as the spec says, their weights, distances, figures and medians by hand, and what a policy makes of them."""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from coordinator.aggregation.server_state import unpack_aggregate
from coordinator.config import Action, FigureRule, RobustnessSettings
from coordinator.errors import ValidationError
from coordinator.rounds.records import AggregateRecord, FederationRecord, UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates import robustness
from coordinator.updates.screening import LEFT_OUT_ROUNDS, left_out, plateau_reason, typical_distances
from coordinator.updates.validation import base_in, max_update_bytes, validate_update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import FederationSpec, RoundPolicy
from fedcg.wire.artifacts.artifacts import Base, artifact_id, decompress_payload, join_artifact, pack, split_artifact
from fedcg.wire.artifacts.payload import MIN_CHANNEL, Array
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from fedcg.wire.parts import Part, UpdateCodec
from tests.support.coordinator import toy_artifacts
from tests.support.coordinator.engine import policy_of
from tests.unit.coordinator.aggregation.test_aggregation import founded

# ------------------------------------------------------------------ weights


@pytest.mark.parametrize(
    ("reported", "settings", "given"),
    [
        pytest.param((100, 200, 300, 10**9), {}, (100, 200, 300, 600), id="at most three medians, the lower of two"),
        pytest.param((100, 120, 300), {}, (100, 120, 300), id="within three medians nothing changes"),
        pytest.param((100, 10**9), {}, (100, 300), id="two devices, of which one lies"),
        # 0.4 of the total: d = 0.4 / 0.6 * (100 + 100 + 100) = 200
        pytest.param((100, 100, 100, 5000), {"max_share": 0.4}, (100, 100, 100, 200), id="the operator's share of all"),
        # c and d are beyond it: 0.3 / (1 - 2 * 0.3) * (100 + 100) = 150
        pytest.param((100, 100, 4000, 5000), {"max_share": 0.3}, (100, 100, 150, 150), id="two beyond the share"),
        pytest.param((7, 70), {"max_share": 0.1}, (7, 7), id="a share that no device can be below"),
    ],
)
def test_a_device_counts_for_its_report_up_to_a_bound(
    reported: tuple[int, ...], settings: dict[str, float], given: tuple[int, ...]
) -> None:
    medians = {"weight_medians": 1e9} if settings else {}
    weights = robustness.given_weights(
        dict(zip("abcd", reported, strict=False)), RobustnessSettings(**medians, **settings)
    )
    assert weights == dict(zip("abcd", given, strict=False))


def test_the_operators_numbers_stand_in_the_place_of_reported_ones_and_are_not_capped() -> None:
    settings = RobustnessSettings(examples={"a": 2000, "absent": 5})
    assert robustness.given_weights({"a": 1, "b": 100, "c": 10**6}, settings) == {"a": 2000, "b": 100, "c": 6000}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 1 << 40), max_size=8),
    st.floats(0.05, 1.0),
    st.floats(1.0, 10.0),
)
def test_no_weight_grows_and_none_vanishes(reported: dict[str, int], share: float, medians: float) -> None:
    weights = robustness.given_weights(reported, RobustnessSettings(max_share=share, weight_medians=medians))
    assert weights.keys() == reported.keys()
    assert all(1 <= weights[client] <= count for client, count in reported.items())
    if share * len(weights) > 1:
        assert all(weight <= share * sum(weights.values()) + len(weights) for weight in weights.values())


# ------------------------------------------------------------------ distances


def parts_of(*numbers: float, counter: int = 0) -> dict[Part, dict[str, Array]]:
    return {
        Part.CLASSIFIER: {"weight": np.array(numbers, np.float32), "num_batches_tracked": np.array(counter, np.int64)}
    }


BASE = Base("0" * 64, parts_of(3.0, 4.0))


def test_a_distance_is_the_l2_norm_of_the_difference_without_counters() -> None:
    assert robustness.Yardstick(BASE, {}).distances(parts_of(3.0, 16.0, counter=10**6)) == {Part.CLASSIFIER: 12.0}
    assert robustness.Yardstick(Base("0" * 64, {}), {}).distances(parts_of(3.0, 4.0)) == {Part.CLASSIFIER: 5.0}


def test_an_update_is_rejected_beyond_ten_times_the_bases_norm_or_the_last_median_whichever_is_larger() -> None:
    first, later = robustness.Yardstick(BASE, {}), robustness.Yardstick(BASE, {Part.CLASSIFIER: 7.0})
    assert first.bounds == {Part.CLASSIFIER: robustness.DISTANCE_BOUND * 5.0}
    assert later.bounds == {Part.CLASSIFIER: robustness.DISTANCE_BOUND * 7.0}
    first.check("a", {Part.CLASSIFIER: 50.0})
    later.check("a", {Part.CLASSIFIER: 70.0})
    for distance in (50.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match=r"its classifier from the round's base is .*; the bound is 50"):
            first.check("a", {Part.CLASSIFIER: distance})


def test_a_part_without_a_base_has_an_absolute_bound() -> None:
    yardstick, zeros = (robustness.Yardstick(Base("0" * 64, parts), {}) for parts in ({}, parts_of(0.0, 0.0)))
    yardstick.check("a", {Part.CLASSIFIER: 9e4})
    zeros.check("a", {Part.CLASSIFIER: 9e4})  # devices alone can draw it: whole weights come in round 1
    with pytest.raises(ValidationError, match=r"the bound is 1e\+05"):
        yardstick.check("a", {Part.CLASSIFIER: 1.1e5})


def test_what_is_beyond_the_limit_is_scaled_back_to_it_and_the_rest_is_left_as_it_is() -> None:
    limits = robustness.limits_of({Part.CLASSIFIER: 2.0, Part.GENERATOR: 0.0}, 3.0)
    assert limits == {Part.CLASSIFIER: 6.0}
    shares = robustness.over({Part.CLASSIFIER: 12.0}, limits)
    assert shares == {Part.CLASSIFIER: 0.5}
    kept = robustness.clipped(parts_of(3.0, 16.0, counter=9), BASE.parts, shares)[Part.CLASSIFIER]
    assert kept["weight"].tolist() == [3.0, 10.0]
    assert int(kept["num_batches_tracked"]) == 9
    assert robustness.over({Part.CLASSIFIER: 6.0}, limits) == {}
    untouched = parts_of(1.0, 2.0)
    assert robustness.clipped(untouched, BASE.parts, {})[Part.CLASSIFIER] is untouched[Part.CLASSIFIER]


def test_the_outlier_is_the_farthest_in_medians_of_its_part() -> None:
    near, far = {Part.CLASSIFIER: 1.0, Part.GENERATOR: 100.0}, {Part.CLASSIFIER: 5.0, Part.GENERATOR: 90.0}
    wide = {Part.CLASSIFIER: 1.0, Part.GENERATOR: 250.0}
    assert robustness.medians_of([near, far, wide]) == {Part.CLASSIFIER: 1.0, Part.GENERATOR: 100.0}
    assert robustness.outlier({"a": near, "b": far, "c": wide}) == "b"


# ------------------------------------------------------------------ what the database says


class Past:
    """A federation's database with rounds of updates."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder / "database.sqlite")
        record = FederationRecord("f", "fedcg", "5" * 64, policy_of(99, 1), 1.0)
        self.store.add_federation(record, AggregateRecord("f", 0, 0, "0" * 64, 10, "e" * 64, 1.0))
        for device in "abcd":
            self.store.add_device(device, device * 64, 1.0)

    def round(
        self,
        number: int,
        rejected: Sequence[str] = (),
        accepted: Sequence[str] = (),
        distances: str = "{}",
        reports: Sequence[str | None] = (None,) * 4,
    ) -> None:
        """A closed round that has these updates."""
        self.store.open_attempt("f", RoundAttempt(number, 1), "0" * 64, frozenset("abcd"), 1.0, 2.0)
        for client, report in zip([*rejected, *accepted], reports, strict=False):
            outcome, reason = Outcome.REJECTED if client in rejected else Outcome.ACCEPTED, f"because of {number}"
            ended = ("f", number, 1, client, client * 64, 1, outcome, reason, report, 1.0, 2.0, distances)
            self.store.end_update(UpdateRecord(*ended))
        self.store.start_distilling("f", RoundAttempt(number, 1), 3.0)
        self.store.weigh("f", RoundAttempt(number, 1), dict.fromkeys(accepted, 10))
        self.store.close_attempt(AggregateRecord("f", number, 1, f"{number}" * 64, 1, "e" * 64, 4.0))


def test_two_rejections_running_leave_a_device_out_for_five_rounds_and_one_does_not(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.round(1, rejected="ab", accepted="c")
    assert left_out(past.store, "f", 2) == {}
    past.round(2, rejected="a", accepted="bc")
    back = 3 + LEFT_OUT_ROUNDS
    for number in range(3, back):
        assert left_out(past.store, "f", number) == {"a": "because of 2"}
    assert left_out(past.store, "f", back) == {}
    past.round(back, rejected="a", accepted="bc")
    assert left_out(past.store, "f", back + 1) == {"a": f"because of {back}"}
    past.store.readmit("b", 5.0)
    assert "a" in left_out(past.store, "f", back + 1)
    past.store.readmit("a", 5.0)
    assert left_out(past.store, "f", back + 1) == {}
    past.store.close()


def votes(folder: Path, *rounds: tuple[float | None, ...], patience: int = 2) -> str:
    """Why a federation ends whose clients a, b, c, d reported these accuracies, round by round; None: none."""
    folder.mkdir()
    past = Past(folder)
    for number, accuracies in enumerate(rounds, 1):
        reports = [json.dumps({"accuracy": one}) for one in accuracies]
        past.round(number, accepted="abcd"[: len(accuracies)], reports=reports)
    policy = RoundPolicy(rounds=99, min_clients=1, min_cohort=1, stop_patience=patience)
    with closing(past.store):
        return plateau_reason(past.store, "f", policy, lambda number: number != 9)


def test_one_device_that_reports_what_it_likes_does_not_end_a_federation(tmp_path: Path) -> None:
    rising = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9))
    for number, lie in enumerate(((1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.5, 0.5))):
        told = [(*honest, lied) for honest, lied in zip(rising, lie, strict=True)]
        assert votes(tmp_path / str(number), *told) == ""
    assert votes(tmp_path / "alone", (1.0,), (0.5,), (0.5,)) == ""  # no federation ends by one device's word
    of_two = [(own, lied) for (own, _), lied in zip(rising, (1.0, 0.0, 0.0, 0.0), strict=True)]
    assert votes(tmp_path / "two", *of_two) == ""


def test_a_federation_ends_when_the_accuracies_of_more_than_half_of_its_clients_rise_no_more(tmp_path: Path) -> None:
    ended = votes(tmp_path / "ended", (0.5, 0.6, 0.1), (0.7, 0.9, 0.2), (0.7, 0.8, 0.3), (0.6, 0.9, 0.4))
    assert ended == "the accuracies of 2 of 3 clients have not risen by more than 0.1 points in 2 rounds"
    assert votes(tmp_path / "half", (0.5, 0.5, 0.1, 0.1), (0.5, 0.5, 0.2, 0.2), (0.5, 0.5, 0.3, 0.3)) == ""
    assert votes(tmp_path / "early", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)) == ""
    unreported = [(0.5, 0.5, None, None)] * 4
    assert votes(tmp_path / "unreported", *unreported) == ""


def test_the_medians_are_those_of_the_merged_updates_of_the_closed_attempt(tmp_path: Path) -> None:
    past = Past(tmp_path)
    past.round(1, rejected="d", accepted="abc", distances='{"classifier": 2.5}')
    past.store.reject_update("f", RoundAttempt(1, 1), "nobody", "")
    assert typical_distances(past.store, "f", 1) == {Part.CLASSIFIER: 2.5}
    past.store.reject_update("f", RoundAttempt(1, 1), "c", "it diverged")  # two are left: no majority
    assert typical_distances(past.store, "f", 1) == {}
    assert typical_distances(past.store, "f", 0) == {}
    past.store.close()


HONEST, SETTINGS = robustness.Figures(1.0, 0.6, 0.6), RobustnessSettings()


def movement(step: list[float], distance: float = 1.0) -> robustness.Movement:
    return robustness.Movement({Part.CLASSIFIER: distance}, {"classifier": np.array(step)})


def test_a_step_against_the_others_has_their_cosine_with_the_sign_flipped() -> None:
    # Unit steps: a = (1, 0), b = (0.8, 0.6), c = (0.6, 0.8), d = -a. Cosines of a: 0.8, 0.6, -1, median 0.6;
    # of b: 0.8, 0.96, -0.8, median 0.8; of c: 0.6, 0.96, -0.6, median 0.6; of d: -1, -0.8, -0.6, median -0.8.
    steps = {"a": [1.0, 0.0], "b": [8.0, 6.0], "c": [0.06, 0.08], "d": [-5.0, 0.0]}
    figures = robustness.figures_of({client: movement(step) for client, step in steps.items()})
    assert [figures[client].direction for client in "abcd"] == pytest.approx([0.6, 0.8, 0.6, -0.8])
    assert [each.typical_direction for each in figures.values()] == pytest.approx([0.6] * 4)
    actions = [robustness.verdict_of(figures[client], SETTINGS, 4).action for client in "abcd"]
    assert actions == [None, None, None, "quarantine"]


def test_distances_are_given_in_medians() -> None:
    updates = {"a": movement([1.0], 2.0), "b": movement([1.0], 3.0), "c": movement([1.0], 30.0)}
    assert robustness.figures_of(updates)["c"] == robustness.Figures(10.0, 1.0, 1.0)


def test_two_updates_are_no_cohort_to_compare_with() -> None:
    found = robustness.figures_of({"a": movement([1.0]), "b": movement([-1.0], 100.0)})
    assert found["b"] == robustness.Figures()
    assert robustness.verdict_of(found["b"], SETTINGS, 2) == robustness.Verdict()


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        ({"norm": 3.1}, "3.1 times as long as the median (at most 3)"),
        ({"direction": 0.29}, "points away from the others' (cosine 0.29, median 0.60, at least 0.30)"),
        ({"direction": -0.11, "typical_direction": 0.4}, "at least -0.10"),  # below OPPOSITE
        ({"direction": -0.76, "typical_direction": 0.0}, "at least -0.54"),  # one of three against the two others
    ],
)
def test_each_figure_has_a_bound_from_which_on_an_update_is_odd(odd: dict[str, float], reason: str) -> None:
    verdict = robustness.verdict_of(robustness.Figures(**{**vars(HONEST), **odd}), SETTINGS, 5)
    assert verdict.action == "quarantine"
    assert reason in verdict.reasons[0]


@pytest.mark.parametrize(
    "fine",
    [
        {},
        {"norm": 2.9},
        {"direction": 0.31},
        {"direction": 0.06, "typical_direction": 0.59},  # a device with other classes than the others
        {"direction": -0.11, "typical_direction": -0.07},  # converged: steps have nothing in common
        {"direction": -0.14, "typical_direction": 0.39},
    ],
)
def test_within_the_bounds_nothing_happens(fine: dict[str, float]) -> None:
    assert robustness.verdict_of(robustness.Figures(**{**vars(HONEST), **fine}), SETTINGS, 5) == robustness.Verdict()


def test_the_absolute_cut_off_needs_five_updates() -> None:
    step = robustness.Figures(direction=-0.12, typical_direction=0.41)
    assert [robustness.verdict_of(step, SETTINGS, count).action for count in (3, 4, 5)] == [None, None, "quarantine"]


def test_the_strictest_action_counts_and_every_reason_is_kept() -> None:
    norm, direction = FigureRule(bound=3.0, action="warn"), FigureRule(bound=0.3, action="down-weight")
    settings = RobustnessSettings(norm=norm, direction=direction)
    verdict = robustness.verdict_of(robustness.Figures(9.0, 0.1, 0.6), settings, 5)
    assert verdict.action == "down-weight"
    assert len(verdict.reasons) == 2


@pytest.mark.parametrize(
    ("below", "quorum", "action"), [("warn", 3, "warn"), ("fail", 3, "quarantine"), ("warn", 2, "quarantine")]
)
def test_an_update_that_the_round_needs_is_treated_as_the_operator_chose(
    below: Literal["warn", "fail"], quorum: int, action: Action
) -> None:
    figures = {"a": HONEST, "b": HONEST, "c": robustness.Figures(norm=9.0)}
    verdicts = robustness.verdicts_of(figures, RobustnessSettings(below_quorum=below), quorum)
    assert [verdicts[client].action for client in "abc"] == [None, None, action]


@pytest.mark.parametrize(("action", "weight"), [("warn", 100), ("down-weight", 10), ("quarantine", None)])
def test_an_action_decides_the_weight(action: Action, weight: int | None) -> None:
    verdicts = {"a": robustness.Verdict(), "b": robustness.Verdict(), "c": robustness.Verdict(action, ("odd",))}
    assert robustness.merge_weights({"a": 100, "b": 120, "c": 100}, verdicts, SETTINGS).get("c") == weight


def test_an_update_in_quarantine_has_no_part_in_the_median_that_caps_the_others() -> None:
    verdicts = {"a": robustness.Verdict(), "b": robustness.Verdict(), "c": robustness.Verdict("quarantine")}
    assert robustness.merge_weights({"a": 10, "b": 100, "c": 10**9}, verdicts, SETTINGS) == {"a": 10, "b": 30}


def test_cosines_of_sketches_are_those_of_the_steps_up_to_a_few_hundredths() -> None:
    random = np.random.default_rng(3)
    one, other = random.normal(size=(300, 200)), random.normal(size=(300, 200))
    mixed = 0.6 * one + 0.8 * other

    def sketch(weight: np.ndarray) -> np.ndarray:
        base: dict[Part, dict[str, Array]] = {
            Part.CLASSIFIER: {"w": np.ones((300, 200), np.float32), "count": np.array(3)}
        }
        parts = {Part.CLASSIFIER: {"w": (1.0 + weight).astype(np.float32), "count": np.array(10**6)}}
        found = robustness.sketches_of(parts, base, 7)
        assert set(found) == {"classifier", robustness.OUTPUT}
        return found["classifier"] / np.linalg.norm(found["classifier"])

    first, second, third = sketch(one), sketch(mixed), sketch(other)
    assert first @ second == pytest.approx(0.6, abs=0.05)
    assert first @ third == pytest.approx(0.0, abs=0.05)


SPEC = toy_artifacts.tiny_spec().model_copy(update={"codec": "i8-delta", "with_base": (Part.CLASSIFIER,)})
AGGREGATE = toy_artifacts.aggregate_bytes(SPEC, 0, 0, seed=1)
BASE_ID = artifact_id(AGGREGATE)
OF_A = ("a", RoundAttempt(1, 1))
PARTS = toy_artifacts.random_parts(toy_artifacts.shared_layouts(SPEC), seed=2)


def base() -> Base:
    return base_in(AGGREGATE, SPEC, BASE_ID)


def packed(codec: UpdateCodec = "i8-delta") -> bytes:
    whole = base()
    known = Base(whole.id, {Part.CLASSIFIER: whole.parts[Part.CLASSIFIER]})
    return pack(toy_artifacts.update_header(SPEC, 1, 1, "a", BASE_ID), PARTS, codec, known)


def with_scales(change: Callable[[npt.NDArray[np.float32]], None]) -> bytes:
    head, frame = split_artifact(packed())
    pieces: dict[str, Any] = {key: array.copy() for key, array in load(decompress_payload(frame, 1 << 20)).items()}
    change(pieces["classifier/weight:scale"])
    return join_artifact(head, save(pieces))


def test_a_difference_is_decoded_against_the_aggregate_of_the_round() -> None:
    artifact = validate_update(packed(), SPEC, *OF_A, base())
    assert artifact.header.codecs["classifier/weight"] == "i8-delta"
    np.testing.assert_allclose(artifact.parts[Part.CLASSIFIER]["weight"], PARTS[Part.CLASSIFIER]["weight"], atol=0.005)
    assert np.array_equal(artifact.parts[Part.GENERATOR]["weight"], PARTS[Part.GENERATOR]["weight"])


def test_a_difference_without_its_aggregate_is_rejected_with_the_digest() -> None:
    with pytest.raises(ValidationError, match=BASE_ID):
        validate_update(packed(), SPEC, *OF_A, Base("0" * 64, base().parts))


@pytest.mark.parametrize("codec", ["f32", "f16", "i8", "f16-delta"])
def test_an_update_coded_otherwise_than_the_spec_says_is_rejected(codec: UpdateCodec) -> None:
    with pytest.raises(ValidationError, match="not coded as they must be"):
        validate_update(packed(codec), SPEC, *OF_A, base())


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_is_no_scale_is_rejected_with_its_reason(scale: float) -> None:
    def spoil(scales: npt.NDArray[np.float32]) -> None:
        scales[1] = scale

    with pytest.raises(ValidationError, match="classifier/weight: the scale of channel 1"):
        validate_update(with_scales(spoil), SPEC, *OF_A, base())


def test_the_distance_is_that_of_the_decoded_numbers() -> None:
    def enlarge(scales: npt.NDArray[np.float32]) -> None:
        scales[:] = 1e30

    yardstick = robustness.Yardstick(base(), {})
    parts = validate_update(with_scales(enlarge), SPEC, *OF_A, yardstick.base).parts
    with pytest.raises(ValidationError, match=r"its classifier from the round's base is .*e\+33"):
        yardstick.check("a", yardstick.distances(parts))


def test_no_more_bytes_are_taken_than_the_codec_needs() -> None:
    assert len(packed()) <= max_update_bytes(SPEC) < max_update_bytes(SPEC.model_copy(update={"codec": "f32"}))


def test_the_first_aggregate_is_the_decoded_one_for_both_sides(tmp_path: Path) -> None:
    ids, store = founded(tmp_path)
    spec = FederationSpec.parse(store.get(ids.spec))
    assert (spec.codec, spec.aggregate_codec) == ("i8-delta", "f16")
    method = get_method(spec.method)
    decoded = unpack_aggregate(store.get(ids.aggregate), spec, method).parts
    exact = method.init_server(spec, initial_parts(spec, spec_root(spec.seed))).aggregate.parts
    box = base_in(store.get(ids.aggregate), spec, ids.aggregate).parts
    for part, weights in exact.items():
        for name, tensor in weights.items():
            large = tensor.ndim > 1 and tensor[0].numel() >= MIN_CHANNEL
            assert decoded[part][name].equal(tensor.half().float() if large else tensor)
            assert np.array_equal(box[part][name], decoded[part][name].numpy())
