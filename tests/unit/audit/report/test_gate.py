"""Gates compare the end of the interval that speaks against the device."""

from dataclasses import replace

import pytest

from audit.choices import parse_gate
from audit.errors import GateFormError
from audit.evidence.case import Knowledge
from audit.measures import Control, Figure, Interval, Outcome
from audit.report import Result, finding_of, judge, largest_gains
from tests.support.audit.reports import attack


def _figure(name: str, gain: Interval, *, given: bool = False, value: float = 0.5) -> Figure:
    knowledge = (Knowledge.UPDATE, Knowledge.PRIVATE) if given else (Knowledge.UPDATE,)
    return Figure(
        name, "title", f"setting {gain.high}", knowledge, Interval(value, value, value + 0.1), 0.5, "guess", gain, 10
    )


def test_the_upper_end_of_the_worst_setting_decides() -> None:
    outcome = Outcome(
        "labels", (_figure("reid", Interval(0.0, -0.1, 0.01)), _figure("reid", Interval(0.01, 0.0, 0.03)))
    )
    (verdict,) = judge(parse_gate("reid_gain<0.02"), [outcome])
    assert not verdict.passed
    assert "0.03" in verdict.why
    assert judge(parse_gate("reid_gain < 0.031"), [outcome])[0].passed


def test_a_value_is_compared_by_its_own_interval() -> None:
    outcome = Outcome("membership", (_figure("mia_auc", Interval(0.0, 0.0, 0.0), value=0.52),))
    assert not judge(parse_gate("mia_auc<0.60"), [outcome])[0].passed
    assert judge(parse_gate("mia_auc<0.63"), [outcome])[0].passed


def test_a_ceiling_is_no_risk() -> None:
    outcome = Outcome(
        "x", (_figure("reid", Interval(0.0, 0.0, 0.0)), _figure("reid", Interval(0.9, 0.8, 1.0), given=True))
    )
    assert judge(parse_gate("reid_gain<0.02"), [outcome])[0].passed


def test_the_gradient_of_a_batch_decides_only_where_nothing_was_measured_on_the_update() -> None:
    batch = replace(_figure("reid", Interval(0.9, 0.8, 1.0)), knowledge=(Knowledge.UPDATE, Knowledge.BATCH))
    assert not judge(parse_gate("reid_gain<0.02"), [Outcome("x", (batch,))])[0].passed
    both = Outcome("x", (batch, _figure("reid", Interval(0.0, 0.0, 0.01))))
    assert judge(parse_gate("reid_gain<0.02"), [both])[0].passed


def test_what_was_not_measured_or_not_proven_does_not_pass() -> None:
    skipped = Outcome("membership", skipped="no images")
    (verdict,) = judge(parse_gate("mia_auc<0.6"), [skipped])
    assert not verdict.passed
    assert "membership: no images" in verdict.why
    broken = Outcome("x", (_figure("reid", Interval(0, 0, 0)),), (Control("c", 0.1, "over 0.9", passed=False),))
    (verdict,) = judge(parse_gate("reid_gain<0.02"), [broken])
    assert not verdict.passed
    assert "positive control of x failed" in verdict.why


def test_a_control_of_one_figure_does_not_speak_for_another() -> None:
    gain = Interval(0.0, -0.01, 0.01)
    failed, passed = (
        Control("c", 0.1, "over 0.9", ok, name) for ok, name in ((False, "class_ssim"), (True, "class_recognised"))
    )
    outcome = Outcome("x", (_figure("class_ssim", gain), _figure("class_recognised", gain)), (failed, passed))
    verdicts = judge(parse_gate("class_recognised_gain<0.02,class_ssim_gain<0.02"), [outcome])
    assert [verdict.passed for verdict in verdicts] == [True, False]
    assert largest_gains([outcome]) == {"class_recognised": 0.01}
    finding = finding_of(attack("x"), outcome)
    assert finding.result is Result.NOTHING
    assert finding.headline is not None
    assert finding.headline.name == "class_recognised"
    both = replace(outcome, controls=(failed, replace(passed, passed=False)))
    assert finding_of(attack("x"), both).result is Result.UNPROVEN


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("reid>0.2", "write NAME<NUMBER"),
        ("ried_gain<0.1", "no figure 'ried'; there are label_l1"),
        ("reid<much", "NUMBER"),
    ],
)
def test_a_gate_of_another_form_is_refused(text: str, said: str) -> None:
    with pytest.raises(GateFormError, match=said):
        parse_gate(text)


def test_no_gate_is_no_condition() -> None:
    assert parse_gate("") == ()
    assert [str(one) for one in parse_gate("reid_gain<0.02, mia_auc<0.60,")] == ["reid_gain<0.02", "mia_auc<0.6"]
