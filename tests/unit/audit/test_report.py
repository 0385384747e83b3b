"""Intervals and figures by hand; gates, which compare the end that speaks against the device; the page, honest about what was not shown."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from audit import measures, report
from audit.attacks.membership import auc, aucs, true_positive_rate, true_positive_rates
from audit.choices import parse_gate
from audit.errors import GateFormError
from audit.evidence.case import Knowledge
from audit.measures import Control, Figure, Interval, Outcome, bootstrap, png, proportion, psnr, ssim, unit_pixels
from audit.report import LEVEL, Finding, Result, corrected, evidence, findings_of, judge, largest_gains, render
from tests.support.audit import SUBJECT, VERDICTS, attack, figure, findings
from tests.support.present import present

QUIET, LOUD = figure("reid", Interval(0.0, -0.1, 0.01)), figure("reid", Interval(0.01, 0.0, 0.03))
BATCH = replace(figure("reid", Interval(0.9, 0.8, 1.0)), knowledge=(Knowledge.UPDATE, Knowledge.BATCH))
CEILING, VALUE = figure("reid", Interval(0.9, 0.8, 1.0), given=True), figure("mia_auc", Interval(0.42, 0.42, 0.52))


@pytest.mark.parametrize(
    ("gate", "figures", "why"),
    [
        pytest.param("reid_gain<0.02", (QUIET, LOUD), "at most 0.03", id="the upper end of the worst setting"),
        pytest.param("reid_gain < 0.031", (QUIET, LOUD), None, id="below it"),
        pytest.param("mia_auc<0.60", (VALUE,), "at most 0.62", id="a value, by its own interval"),
        pytest.param("mia_auc<0.63", (VALUE,), None, id="beyond it"),
        pytest.param("reid_gain<0.02", (QUIET, CEILING), None, id="a ceiling is no risk"),
        pytest.param(
            "reid_gain<0.02", (BATCH,), "at most 1 ", id="a batch's gradient, where nothing was measured on the update"
        ),
        pytest.param("reid_gain<0.02", (BATCH, QUIET), None, id="a batch's gradient beside the update"),
    ],
)
def test_a_gate_compares_the_end_that_speaks_against_the_device(
    gate: str, figures: tuple[Figure, ...], why: str | None
) -> None:
    (verdict,) = judge(parse_gate(gate), [Outcome("x", figures)])
    assert verdict.passed is (why is None)
    assert why is None or why in verdict.why


def test_what_was_not_measured_or_not_proven_does_not_pass() -> None:
    (verdict,) = judge(parse_gate("mia_auc<0.6"), [Outcome("membership", skipped="no images")])
    assert not verdict.passed
    assert "membership: no images" in verdict.why
    broken = Outcome("x", (figure("reid", Interval(0, 0, 0)),), (Control("c", 0.1, "over 0.9", passed=False),))
    (verdict,) = judge(parse_gate("reid_gain<0.02"), [broken])
    assert not verdict.passed
    assert "positive control of x failed" in verdict.why


def test_no_gate_passes_beside_an_attack_that_ended_with_an_error() -> None:
    failed = Outcome.failure("membership", ValueError("out of memory"))
    (verdict,) = judge(parse_gate("mia_auc<0.63"), [Outcome("image_generator", (VALUE,)), failed])
    assert (verdict.passed, verdict.why) == (False, "inconclusive, membership failed: ValueError: out of memory")


def test_a_control_of_one_figure_does_not_speak_for_another() -> None:
    gain = Interval(0.0, -0.01, 0.01)
    failed, passed = (
        Control("c", 0.1, "over 0.9", ok, name) for ok, name in ((False, "class_ssim"), (True, "class_recognised"))
    )
    outcome = Outcome("x", (figure("class_ssim", gain), figure("class_recognised", gain)), (failed, passed))
    verdicts = judge(parse_gate("class_recognised_gain<0.02,class_ssim_gain<0.02"), [outcome])
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert largest_gains([outcome]) == {"class_recognised": 0.01}
    finding = _found(outcome)
    assert finding.result is Result.NOTHING
    assert present(finding.headline).name == "class_recognised"
    both = replace(outcome, controls=(failed, replace(passed, passed=False)))
    assert _found(both).result is Result.UNPROVEN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ried_gain<0.1", "no figure 'ried'; choose label_l1"),
        ("reid<much", "NUMBER"),
        ("reid<0.1,label_l1<0.3", "gate 'label_l1<0.3': a small label_l1 is a leak, .* write label_l1_gain<NUMBER"),
    ],
)
def test_a_gate_of_another_form_is_refused(text: str, said: str) -> None:
    with pytest.raises(GateFormError, match=said):
        parse_gate(text)


def test_no_gate_is_no_condition() -> None:
    assert parse_gate("") == ()
    assert [str(one) for one in parse_gate("reid_gain<0.02, mia_auc<0.60,")] == ["reid_gain<0.02", "mia_auc<0.6"]


def _found(*outcomes: Outcome) -> Finding:
    """The first of several findings of one report."""
    return findings_of([attack(one.attack) for one in outcomes], outcomes)[0]


def _page() -> str:
    return render(SUBJECT, findings(), VERDICTS, "2026-11-23 10:00 UTC")


def test_each_outcome_has_its_result_and_a_ceiling_never_stands_for_an_attack() -> None:
    assert [one.result for one in findings()] == [Result.LEAKED, Result.NOTHING, Result.UNPROVEN, Result.NOT_TRIED]
    assert present(findings()[0].headline).setting == "classifier alone"


def test_the_gradient_of_a_batch_is_not_what_left() -> None:
    batch = replace(figure("reid", Interval(0.9, 0.8, 1.0)), knowledge=(Knowledge.BATCH,))
    assert _found(Outcome("x", (batch,))).result is Result.HYPOTHETICAL
    found = _found(Outcome("x", (batch, figure("reid", Interval(0.0, -0.1, 0.1)))))
    assert (found.result, found.headline) == (Result.HYPOTHETICAL, batch)
    assert found.words.endswith("; the update itself: no better than guessing")
    broken = (Control("c", 0.1, "over 0.9", passed=False),)
    found = _found(Outcome("x", (batch, figure("reid", Interval(0.0, -0.1, 0.1))), broken))
    assert found.words.endswith("; the update itself: inconclusive: the positive control failed")
    assert (found.is_inconclusive, _found(Outcome("x", (batch,))).is_inconclusive) == (True, False)


def _with(p: float | None, *, gain: float = 0.03, setting: str = "a") -> Figure:
    return replace(figure("reid", Interval(gain, gain - 0.01, gain + 0.01), setting=setting), p=p)


def test_the_correction_is_holms_over_every_test_of_every_attack() -> None:
    # Ordered 0.001, 0.01, 0.02, 0.5: times 4, 3, 2, 1 = 0.004, 0.03, 0.04, 0.5; a ceiling and a figure without a test don't count.
    first = Outcome("x", (_with(0.01), _with(0.5, setting="b"), _with(None, setting="c"), replace(CEILING, p=1e-9)))
    second = Outcome("y", (_with(0.001), replace(_with(0.02), knowledge=(Knowledge.BATCH,))))
    assert list(corrected([first, second]).values()) == pytest.approx([0.004, 0.03, 0.04, 0.5])
    # Adjusted probabilities never fall: 0.02 times 1 is below 0.03 times 2.
    pair = Outcome("z", (_with(0.02), _with(0.015, setting="b")))
    assert list(corrected([pair]).values()) == pytest.approx([0.03, 0.03])


def test_a_gain_above_chance_in_one_of_many_tests_is_chance() -> None:
    lucky, many = Outcome("x", (_with(0.002),)), Outcome("y", tuple(_with(0.4, setting=str(at)) for at in range(9)))
    assert (_found(lucky).result, _found(lucky, many).result) == (Result.LEAKED, Result.NOTHING)
    sure = Outcome("x", (_with(0.0009),))
    assert _found(sure, many).result is Result.LEAKED
    assert _found(sure, many).chances == {sure.figures[0]: pytest.approx(0.009)}
    assert _found(Outcome("x", (_with(1e-5, gain=-0.03),))).result is Result.NOTHING


def test_a_figure_without_a_test_does_not_decide_and_says_so() -> None:
    found = _found(Outcome("x", (_with(None, gain=0.9),)))
    assert found.result is Result.UNTESTED
    assert "chance: not tested" in found.summary()
    both = _found(Outcome("x", (_with(None, gain=0.9), _with(0.4, setting="b"))))
    assert (both.result, present(both.headline).setting) == (Result.NOTHING, "b")


def test_a_test_that_can_not_show_a_leak_costs_the_others_nothing_and_is_inconclusive() -> None:
    # Of ten tests only one can be below 1 % / 1: a two-class device's labels are guessed with a probability of one half.
    weak = Outcome("y", tuple(replace(_with(0.5, setting=str(at)), least_p=0.5) for at in range(9)))
    assert _found(Outcome("x", (_with(0.009),)), weak).result is Result.LEAKED
    assert _found(weak).result is Result.UNTESTED
    # Three tests that reach 0.4 %: 1 % / 2 is enough for two, 1 % / 3 = 0.33 % for none of them.
    some = [replace(_with(0.004, setting=str(at)), least_p=0.004) for at in range(3)]
    assert [_found(Outcome("x", tuple(some[:n]))).result for n in (2, 3)] == [Result.LEAKED, Result.UNTESTED]


def test_reports_without_a_leak_are_red_at_most_as_often_as_the_level_says() -> None:
    drawn = np.random.default_rng(11)
    audits = [
        [
            Outcome(name, tuple(_with(float(p), setting=str(at)) for at, p in enumerate(drawn.random(20))))
            for name in "xyz"
        ]
        for _ in range(2000)
    ]
    red = sum(any(one <= LEVEL for one in corrected(audit).values()) for audit in audits)
    assert 5 <= red <= 35  # 20 expected; 5 and 35 are 3.4 standard deviations away


def test_evidence_is_interpolated_between_measured_sizes_and_never_for_fewer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = '[[smallest]]\nattack = "x"\neffort = "quick"\nimages = {}\nfigure = "mia_auc"\nleak = {}\nplants = 24\n'
    alarm = '[[false_alarm]]\nattack = "x"\neffort = "quick"\nred = 0\nof = 50\n'
    weak = '[[missed]]\nattack = "x"\neffort = "{}"\nimages = {}\nplant = "counts"\nfound = {}\nof = 20\n'
    plants = weak.format("quick", 100, 7) + weak.format("default", 100, 7) + weak.format("default", 400, 9)
    (tmp_path / "detection.toml").write_text(row.format(100, 0.62) + row.format(400, 0.58) + alarm + plants)
    monkeypatch.setattr(report, "DETECTION_FILE", tmp_path / "detection.toml")
    quiet, loud = _found(Outcome("x", (_with(0.4),))), _found(Outcome("x", (_with(1e-6),)))
    # 200 is halfway between 100 and 400 in logarithms.
    assert evidence(quiet, "quick", 200) == "Smallest leak found in 80 % of plants: mia_auc 0.6 (24 plants)"
    assert "mia_auc 0.58 " in evidence(quiet, "quick", 900)  # more images find smaller leaks
    assert evidence(quiet, "quick", 50) == "Smallest leak found in 80 % of plants: not measured for 50 images"
    assert "not measured" in evidence(quiet, "thorough", 200)
    told = "Weak at this effort: of planted leaks of the strongest kind it found counts "
    assert (evidence(quiet, "default", 200), evidence(quiet, "default", 500)) == (f"{told}7 of 20", f"{told}9 of 20")
    assert "not measured" in evidence(quiet, "default", 50)
    # Clopper-Pearson, 0 of 50: 1 - 0.025^(1 / 50) = 7.1 %.
    assert evidence(loud, "quick", 200) == "False alarms: 0 of 50 audits without a leak (95 %: at most 7.1 %)"
    assert evidence(loud, "default", 200) == "False alarms: not measured"


def test_the_page_loads_nothing() -> None:
    page = _page()
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', page)
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ("verdict", "1 of 3 attacks beat the best guess on this update"),
        ("verdict", "gate reid_gain&lt;0.02: FAILED"),
        ("verdict", "classifier (61,000 numbers), generator (120,000 numbers); report fields accuracy, examples"),
        ("verdict", "attack epsilon (the attacker needs labelled images of the same kind: give --auxiliary)"),
        ("verdict", "3 frames dropped because the observer was too slow"),
        ("verdict", "inconclusive: the positive control failed"),
        ("verdict", "False alarms: 0 of 50 audits without a leak"),
        ("verdict", "Weak at this effort: of planted leaks of the strongest kind it found "),
        ("verdict", '<td class="n">below 0.1 %</td>'),
        ("verdict", "the attacks took 42 s"),
        ("verdict", "Initial weights of the private networks:</b> public spec seed."),
        ("memorisation", "control FAILED"),
        ("memorisation", "a planted generator"),
        ("reidentification", "Reconstructions &lt;b&gt;"),
    ],
)
def test_the_page_says_where_it_belongs_what_was_found_and_what_was_not(section: str, told: str) -> None:
    page = _page()
    assert told in page.split(f'id="{section}"')[1].split("</section>")[0]
    assert "--updates &lt;here&gt;" in page


def test_ceilings_are_marked() -> None:
    section = _page().split('id="reidentification"')[1].split("</section>")[0]
    assert section.count('<tr class="given">') == 1
    assert "+20 points (+10 to +31)" in section
    assert "30.0 % (20.0 to 41.0)" in section


def test_an_assignment_swaps_pairs_of_a_class_and_the_chance_counts_at_least_the_observed() -> None:
    labels, members = np.array([0, 1, 0, 1, 1, 1]), np.array([True, True, False, False, True, False])
    flags = np.concatenate(list(measures.reassigned(labels, members, 0)))
    assert len(flags) == 20_000
    assert (flags[:, labels == 0].sum(1) == 1).all()
    assert (flags[:, labels == 1].sum(1) == 2).all()
    # Both members of class 1 stay in a quarter of the assignments, the one of class 0 in half.
    assert flags.mean(0) == pytest.approx(0.5, abs=0.02)
    assert (flags == members).all(1).mean() == pytest.approx(1 / 8, abs=0.01)
    found = measures.chance(lambda some: (some == members).all(1).astype(float), labels, members, 0)
    assert found.p == pytest.approx(found.least, abs=0.01)
    assert found.least == 1 / 8  # three pairs: 2³ assignments
    assert measures.chance_in(2.0, np.array([1.0, 2.0, 3.0])) == 3 / 4
    assert np.isnan(measures.chance_in(np.nan, np.array([np.nan])))


def test_a_share_of_none_has_the_exact_upper_bound() -> None:
    # Clopper-Pearson with 0 of n: upper = 1 - (0.05 / 2)^(1 / n) = 1 - 0.025^0.1 for n = 10.
    found = proportion(0, 10)
    assert (found.value, found.low) == (0, 0)
    assert found.high == pytest.approx(1 - 0.025**0.1)


def test_a_bootstrap_covers_the_mean_and_a_single_value_is_its_own_interval() -> None:
    found = bootstrap(np.arange(100, dtype=np.float64), 0)
    assert found.value == 49.5
    # Standard error of the mean: 28.87 / 10 = 2.89; 1.96 of them on either side.
    assert found.low == pytest.approx(49.5 - 5.66, abs=0.6)
    assert found.high == pytest.approx(49.5 + 5.66, abs=0.6)
    alone = bootstrap(np.array([3.0]), 0)
    assert (alone.value, alone.low, alone.high) == (3.0, 3.0, 3.0)


def test_auc_counts_pairs() -> None:
    # Pairs (member, other): (3, 2) right, (3, 4) wrong, (1, 2) wrong, (1, 4) wrong: 1 of 4.
    assert auc(np.array([3.0, 1.0]), np.array([2.0, 4.0])) == 0.25
    assert auc(np.array([1.0, 1.0]), np.array([1.0, 1.0])) == 0.5
    # As many assignments at once: members {3, 1}, and all four the other way round.
    scores, members = np.array([3.0, 1.0, 2.0, 4.0]), np.array([[True, True, False, False], [False, False, True, True]])
    assert aucs(scores, members).tolist() == [0.25, 0.75]
    # The threshold that one of two others may pass is the second highest other.
    assert true_positive_rates(scores, members, 0.5).tolist() == [0.5, 1.0]


def test_the_rate_at_few_false_positives_stays_under_them() -> None:
    others = np.arange(100, dtype=np.float64)
    members = np.array([99.5, 98.5, 98.0, 1.0])
    # 1 % of 100 others: one may pass, so the threshold is 98 and lies below 99.5 and 98.5 alone.
    assert true_positive_rate(members, others, 0.01).value == 0.5


def test_psnr_and_ssim_of_images() -> None:
    image = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 0.5
    # A difference of 0.1 everywhere: MSE 0.01, so 10 log10(1 / 0.01) = 20 dB.
    assert psnr(image + 0.1, image) == pytest.approx([20.0, 20.0], abs=1e-4)
    assert ssim(image, image) == pytest.approx([1.0, 1.0])
    assert (ssim(image.flip(0), image) < 0.5).all()
    assert unit_pixels(torch.tensor([255], dtype=torch.uint8)).item() == 1.0
    assert png(image[0]).startswith("iVBOR")
    assert png(image[0, :1]).startswith("iVBOR")
