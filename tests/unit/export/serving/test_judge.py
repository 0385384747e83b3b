"""What a candidate is rejected for, when enough was compared, and what a version in service is taken back for: numbers worked by hand."""

import numpy as np
import pytest

from export.model.runtime import Floats
from export.serving import judge
from tests.support.present import present

STAGE = judge.CandidateStage(images=40, limit_s=600.0)
EVEN = [0, 1, 2, 3] * 10


def _rows(classes: list[int], confidence: float = 0.9) -> Floats:
    rows = np.full((len(classes), 4), (1.0 - confidence) / 3, dtype=np.float32)
    rows[np.arange(len(classes)), classes] = confidence
    return rows


def _pair(
    before: list[int], now: list[int] | None, times_s: tuple[float, float] = (0.01, 0.01), confidence: float = 0.9
) -> judge.Pair:
    return judge.Pair(_rows(before), times_s[0], None if now is None else _rows(now, confidence), times_s[1])


def _compared(before: list[int], now: list[int], confidence: float = 0.9, floor: float = 0.0) -> judge.Comparison:
    """One request per image."""
    comparison = judge.Comparison("0002", "0001", STAGE, floor)
    for one, other in zip(before, now, strict=True):
        comparison.add(_pair([one], [other], confidence=confidence))
    return comparison


def _verdict(comparison: judge.Comparison, elapsed_s: float = 1.0) -> tuple[str, str]:
    found = present(comparison.verdict(elapsed_s))
    assert found.version == "0002"
    return found.kind, found.reason


def test_a_candidate_like_the_version_in_service_passes_once_enough_was_compared() -> None:
    comparison = _compared(EVEN[:-1], EVEN[:-1])
    assert not comparison.is_over(1.0)
    comparison.add(_pair([3], [3]))
    assert comparison.is_over(1.0)
    assert (comparison.verdict(1.0), comparison.progress()) == (
        None,
        judge.Progress(images=40, agreement=1.0, failures=0),
    )
    assert str(comparison.progress()) == "40 images compared, 100% of them got the same class, 0 requests failed"


@pytest.mark.parametrize(
    ("images", "answered", "failed", "elapsed_s", "is_rejected"),
    [
        (40, 0, 4, 1.0, False),
        (40, 0, 5, 1.0, True),
        (1000, 95, 5, 1.0, False),  # 5 of 100, and 5 % are borne
        (1000, 95, 6, 1.0, True),
        (40, 2, 1, 599.9, False),
        (40, 2, 1, 600.0, True),  # the time is up
    ],
)
def test_five_failures_over_5_percent_reject_it_at_once_and_fewer_when_the_time_is_up(
    images: int, answered: int, failed: int, elapsed_s: float, is_rejected: bool
) -> None:
    comparison = judge.Comparison("0002", "0001", judge.CandidateStage(images=images, limit_s=600.0))
    for number in range(answered + failed):
        comparison.add(_pair([number % 4], [number % 4] if number < answered else None))
    reason = f"{failed} of {answered + failed} requests failed that version 0001 answered"
    assert comparison.verdict(elapsed_s) == (judge.VersionFault("0002", "errors", reason) if is_rejected else None)


@pytest.mark.parametrize(
    ("before_s", "now_s", "slow", "is_rejected"),
    [
        (0.010, 0.021, 20, True),  # 2.1 times, 11 ms more
        (0.010, 0.0199, 20, False),  # 1.99 times
        (0.001, 0.0059, 20, False),  # 5.9 times, but 4.9 ms more only
        (0.001, 0.0061, 20, True),  # 5.1 ms more
        (0.01, 5.0, 14, False),
        (0.01, 5.0, 16, True),  # three of four requests took long
    ],
)
def test_it_is_too_slow_at_more_than_twice_the_time_and_5_ms_in_three_of_four_requests(
    before_s: float, now_s: float, slow: int, is_rejected: bool
) -> None:
    comparison = judge.Comparison("0002", "0001", STAGE)
    for number in range(20):
        assert comparison.verdict(1.0) is None, number
        comparison.add(_pair([0], [0], (before_s, now_s if number < slow else before_s)))
    found = comparison.verdict(1.0)
    assert (found is not None and found.kind == "latency") is is_rejected


def test_times_are_per_image_and_the_reason_has_both_figures() -> None:
    comparison = judge.Comparison("0002", "0001", STAGE)
    for _ in range(20):
        comparison.add(_pair([0] * 4, [0] * 4, (0.04, 0.12)))
    kind, reason = _verdict(comparison)
    assert kind == "latency"
    assert "at least 3.0 times as long per image as version 0001, and 20 ms more (of 20 requests; " in reason


def test_it_drifts_when_it_names_one_class_for_everything_but_is_not_judged_before_the_end() -> None:
    comparison = _compared(EVEN[:-1], [0] * 39)
    assert comparison.verdict(1.0) is None
    comparison.add(_pair([3], [0]))
    # Class 0 gains 30 images, the others lose 10 each: (30 + 30) / 2 / 40 = 75 %. By chance: (√30 + 3 √10) / 40 / √2π = 0.149, and
    # 0.25 + 1.5 · 0.149 = 47 %.
    reason = "its predicted classes differ by 75% from those of version 0001 on the same images (allowed 47%)"
    assert _verdict(comparison) == ("drift", reason)


def test_images_that_repeat_count_once_and_so_it_is_compared_for_longer() -> None:
    before = ([0] * 20 + [1] * 20) * 6
    # Changes of class over those expected of independent images (half of all steps), times the images; 20 are needed.
    assert not _compared(before[:40], before[:40]).is_over(1.0)  # 1 / 19.5 · 40 = 2
    assert not _compared(before[:200], before[:200]).is_over(1.0)  # 9 / 99.5 · 200 = 18
    assert _compared(before, before).is_over(1.0)  # 11 / 119.5 · 240 = 22


def test_a_candidate_of_images_that_never_change_passes_after_ten_windows_at_the_latest() -> None:
    before = ([0] * 200 + [1] * 200)[: judge.LONGEST * STAGE.images]
    assert not _compared(before[:-1], before[:-1]).is_over(1.0)
    assert _compared(before, before).is_over(1.0)


def test_classes_that_are_mixed_up_evenly_are_noticed_by_the_accuracies_alone() -> None:
    swapped = [{0: 1, 1: 0}.get(one, one) for one in EVEN]  # 20 of 40 images, and no share changes
    assert _compared(EVEN, swapped).verdict(1.0) is None
    assert judge.least_agreement(0.9, 0.9) == pytest.approx(0.55)  # 0.9 + 0.9 - 1 - 0.25
    kind, reason = _verdict(_compared(EVEN, swapped, floor=0.55))
    assert kind == "drift"
    assert reason == "it predicts the same class as version 0001 for 50% of the images, by accuracy at least 55%"


def test_accuracies_that_are_low_or_unknown_ask_for_no_agreement() -> None:
    assert judge.least_agreement(0.5, 0.7) == 0.0
    assert judge.least_agreement(None, 0.9) == judge.least_agreement(0.9, None) == 0.0


def test_it_drifts_when_it_is_much_less_sure() -> None:
    assert _compared(EVEN, EVEN, confidence=0.71).verdict(1.0) is None
    reason = "its mean confidence is 69%; version 0001 had 90%"
    assert _verdict(_compared(EVEN, EVEN, confidence=0.69)) == ("drift", reason)


def test_when_the_time_is_up_it_passes_with_what_was_compared_and_few_images_are_no_drift() -> None:
    comparison = judge.Comparison("0002", "0001", STAGE)
    assert not comparison.is_over(599.9)
    assert comparison.is_over(600.0)
    assert comparison.verdict(600.0) is None
    assert _compared(EVEN[:19], [0] * 19).verdict(600.0) is None
    assert _verdict(_compared(EVEN[:20], [0] * 20), 600.0)[0] == "drift"


def test_one_large_request_does_not_end_the_comparison_before_the_latency_is_known() -> None:
    comparison = judge.Comparison("0002", "0001", STAGE)
    for number in range(20):
        assert not comparison.is_over(1.0), number
        comparison.add(_pair(EVEN[:8], EVEN[:8]))
    assert comparison.is_over(1.0)


WINDOW = 40


def _even(watch: judge.Watch, version: str, confidence: float = 0.9) -> None:
    for _ in range(WINDOW // 4):
        watch.answered(version, _rows([0, 1, 2, 3], confidence))


def _watch() -> judge.Watch:
    watch = judge.Watch(WINDOW)
    _even(watch, "0001")
    assert watch.verdict() is None  # nothing to compare the first one with
    return watch


def test_a_version_that_names_one_class_for_nearly_everything_goes_once() -> None:
    watch = _watch()
    watch.answered("0002", _rows([0] * (WINDOW - 1)))
    assert watch.verdict() is None  # too few to judge it
    watch.answered("0002", _rows([1]))
    verdict = present(watch.verdict())
    assert (verdict.version, verdict.kind) == ("0002", "drift")
    assert "from those of version 0001" in verdict.reason
    assert watch.verdict() is None


def test_a_version_that_is_much_less_sure_goes_and_one_that_is_a_little_less_sure_stays() -> None:
    watch = _watch()
    _even(watch, "0002", confidence=0.8)
    assert watch.verdict() is None
    watch = _watch()
    _even(watch, "0002", confidence=0.6)
    assert present(watch.verdict()).reason == "its mean confidence is 60%; version 0001 had 90%"


def test_a_version_that_fails_goes_before_it_has_predicted_much() -> None:
    watch = _watch()
    for _ in range(judge.FAILURES - 1):
        watch.failed("0002")
        assert watch.verdict() is None
    watch.failed("0002")
    assert watch.verdict() == judge.VersionFault(
        "0002", "errors", f"{judge.FAILURES} of its first {judge.FAILURES} requests failed"
    )


def test_few_failures_among_many_requests_are_borne() -> None:
    watch = _watch()
    for number in range(200):
        watch.answered("0002", _rows([number % 4]))
    for _ in range(judge.FAILURES):
        watch.failed("0002")
    assert watch.verdict() is None


def test_what_was_taken_back_is_no_measure_for_the_next_version() -> None:
    watch = _watch()
    watch.answered("0002", _rows([0] * WINDOW))
    assert watch.verdict() is not None
    _even(watch, "0001")
    assert watch.verdict() is None
    _even(watch, "0003")
    assert watch.verdict() is None  # like 0001, although 0002 was between
    watch.answered("0004", _rows([0] * WINDOW))
    assert watch.verdict() is not None


def test_a_version_that_is_accepted_is_not_judged() -> None:
    watch = _watch()
    watch.accept("0002")
    watch.answered("0002", _rows([0] * WINDOW))
    assert watch.verdict() is None


def test_a_window_of_0_watches_nothing() -> None:
    watch = judge.Watch(0)
    watch.answered("0001", _rows([0]))
    watch.failed("0001")
    assert watch.verdict() is None


@pytest.mark.parametrize(("run", "goes"), [(1, True), (10, False)])
def test_images_in_runs_count_as_few_independent_ones(run: int, goes: bool) -> None:
    watch, verdicts = judge.Watch(WINDOW), []
    for version, classes in (("0001", [0, 1, 2, 3]), ("0002", [0, 1])):
        repeats = WINDOW // len(classes) // run
        watch.answered(version, _rows([one for one in classes * repeats for _ in range(run)]))
        verdicts.append(watch.verdict())
    assert [one is not None for one in verdicts] == [False, goes]


def test_failures_that_the_version_before_had_as_well_are_no_reason() -> None:
    watch = judge.Watch(WINDOW)
    for version in ("0001", "0002"):
        for number in range(100):
            watch.answered(version, _rows([number % 4]))
            if number % 10 == 0:
                watch.failed(version)
            assert watch.verdict() is None
