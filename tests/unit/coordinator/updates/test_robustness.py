"""Weights, distances and medians of updates by hand, and what a round's database says of devices."""

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.config import RobustnessSettings
from coordinator.errors import ValidationError
from coordinator.rounds.records import AggregateRecord, FederationRecord, UpdateRecord
from coordinator.storage.store import Store
from coordinator.updates.robustness import (
    DISTANCE_BOUND,
    Yardstick,
    clipped,
    given_weights,
    limits_of,
    medians_of,
    outlier,
    over,
)
from coordinator.updates.screening import LEFT_OUT_ROUNDS, left_out, plateau_reason, typical_distances
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.artifacts.artifacts import Base
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.messages.schemas import Outcome, RoundAttempt
from fedcg.wire.parts import Part
from tests.support.coordinator.engine import policy_of

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
def test_a_device_counts_for_what_it_reported_up_to_a_bound(
    reported: tuple[int, ...], settings: dict[str, float], given: tuple[int, ...]
) -> None:
    medians = {"weight_medians": 1e9} if settings else {}
    weights = given_weights(dict(zip("abcd", reported, strict=False)), RobustnessSettings(**medians, **settings))
    assert weights == dict(zip("abcd", given, strict=False))


def test_the_operators_numbers_stand_in_the_place_of_reported_ones_and_are_not_capped() -> None:
    settings = RobustnessSettings(examples={"a": 2000, "absent": 5})
    assert given_weights({"a": 1, "b": 100, "c": 10**6}, settings) == {"a": 2000, "b": 100, "c": 6000}


@given(
    st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(1, 1 << 40), max_size=8),
    st.floats(0.05, 1.0),
    st.floats(1.0, 10.0),
)
def test_no_weight_grows_and_none_vanishes(reported: dict[str, int], share: float, medians: float) -> None:
    weights = given_weights(reported, RobustnessSettings(max_share=share, weight_medians=medians))
    assert weights.keys() == reported.keys()
    assert all(1 <= weights[client] <= count for client, count in reported.items())
    if share * len(weights) > 1:
        assert all(weight <= share * sum(weights.values()) + len(weights) for weight in weights.values())


# ------------------------------------------------------------------ distances


def parts_of(*numbers: float, counter: int = 0) -> dict[Part, dict[str, Array]]:
    return {
        Part.CLASSIFIER: {
            "weight": np.array(numbers, np.float32),
            "num_batches_tracked": np.array(counter, np.int64),
        }
    }


BASE = Base("0" * 64, parts_of(3.0, 4.0))


def test_a_distance_is_the_l2_norm_of_the_difference_without_counters() -> None:
    assert Yardstick(BASE, {}).distances(parts_of(3.0, 16.0, counter=10**6)) == {Part.CLASSIFIER: 12.0}
    assert Yardstick(Base("0" * 64, {}), {}).distances(parts_of(3.0, 4.0)) == {Part.CLASSIFIER: 5.0}


def test_an_update_is_rejected_beyond_ten_times_the_bases_norm_or_the_last_median_whichever_is_larger() -> None:
    first, later = Yardstick(BASE, {}), Yardstick(BASE, {Part.CLASSIFIER: 7.0})
    assert first.bounds == {Part.CLASSIFIER: DISTANCE_BOUND * 5.0}
    assert later.bounds == {Part.CLASSIFIER: DISTANCE_BOUND * 7.0}
    first.check("a", {Part.CLASSIFIER: 50.0})
    later.check("a", {Part.CLASSIFIER: 70.0})
    for distance in (50.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError, match=r"its classifier is .* away from the round's base; the bound is 50"):
            first.check("a", {Part.CLASSIFIER: distance})


def test_a_part_without_a_base_has_an_absolute_bound() -> None:
    yardstick = Yardstick(Base("0" * 64, {}), {})
    yardstick.check("a", {Part.CLASSIFIER: 9e4})
    with pytest.raises(ValidationError, match=r"the bound is 1e\+05"):
        yardstick.check("a", {Part.CLASSIFIER: 1.1e5})


def test_what_is_beyond_the_limit_is_scaled_back_to_it_and_the_rest_is_left_as_it_is() -> None:
    limits = limits_of({Part.CLASSIFIER: 2.0, Part.GENERATOR: 0.0}, 3.0)
    assert limits == {Part.CLASSIFIER: 6.0}
    shares = over({Part.CLASSIFIER: 12.0}, limits)
    assert shares == {Part.CLASSIFIER: 0.5}
    kept = clipped(parts_of(3.0, 16.0, counter=9), BASE.parts, shares)[Part.CLASSIFIER]
    assert kept["weight"].tolist() == [3.0, 10.0]
    assert int(kept["num_batches_tracked"]) == 9
    assert over({Part.CLASSIFIER: 6.0}, limits) == {}
    untouched = parts_of(1.0, 2.0)
    assert clipped(untouched, BASE.parts, {})[Part.CLASSIFIER] is untouched[Part.CLASSIFIER]


def test_the_outlier_is_the_farthest_in_medians_of_its_part() -> None:
    near, far = {Part.CLASSIFIER: 1.0, Part.GENERATOR: 100.0}, {Part.CLASSIFIER: 5.0, Part.GENERATOR: 90.0}
    wide = {Part.CLASSIFIER: 1.0, Part.GENERATOR: 250.0}
    assert medians_of([near, far, wide]) == {Part.CLASSIFIER: 1.0, Part.GENERATOR: 100.0}
    assert outlier({"a": near, "b": far, "c": wide}) == "b"


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
        rejected: str = "",
        accepted: str = "",
        distances: str = "{}",
        reports: Sequence[str | None] = (None,) * 4,
    ) -> None:
        key = ("f", RoundAttempt(number, 1))
        self.store.open_attempt(*key, "0" * 64, frozenset("abcd"), 1.0, 2.0)
        for client, report in zip(rejected + accepted, reports, strict=False):
            outcome = Outcome.REJECTED if client in rejected else Outcome.ACCEPTED
            record = UpdateRecord(
                "f", number, 1, client, client * 64, 1, outcome, f"because of {number}", report, 1.0, 2.0, distances
            )
            self.store.end_update(record)
        self.store.start_distilling(*key, 3.0)
        self.store.weigh(*key, dict.fromkeys(accepted, 10))
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
        return plateau_reason(past.store, "f", policy)


def test_one_device_that_reports_what_it_likes_does_not_end_a_federation(tmp_path: Path) -> None:
    rising = ((0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9))
    for number, lie in enumerate(((1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 0.0, 0.0), (0.0, 1.0, 0.5, 0.5))):
        told = [(*honest, lied) for honest, lied in zip(rising, lie, strict=True)]
        assert votes(tmp_path / str(number), *told) == ""
    assert votes(tmp_path / "alone", (1.0,), (0.5,), (0.5,)) == ""  # no federation ends by one device's word
    assert (
        votes(tmp_path / "two", *[(own, lied) for (own, _), lied in zip(rising, (1.0, 0.0, 0.0, 0.0), strict=True)])
        == ""
    )


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
