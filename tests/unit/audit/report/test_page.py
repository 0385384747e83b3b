"""One page for a privacy officer: self-contained, and honest about what was not shown."""

import json
import re
from dataclasses import replace

from audit.evidence.case import Knowledge
from audit.measures import Curve, Interval, Outcome
from audit.report import Result, finding_of, render, report_of, svg
from tests.support.audit.reports import SUBJECT, VERDICTS, attack, figure, findings


def _page() -> str:
    return render(SUBJECT, findings(), VERDICTS, "2026-11-23 10:00 UTC")


def test_each_outcome_has_its_result() -> None:
    assert [one.result for one in findings()] == [Result.LEAKED, Result.NOTHING, Result.UNPROVEN, Result.NOT_TRIED]


def test_a_ceiling_never_stands_for_an_attack() -> None:
    headline = findings()[0].headline
    assert headline is not None
    assert headline.setting == "classifier alone"


def test_the_gradient_of_a_batch_is_not_what_left() -> None:
    batch = replace(figure("reid", Interval(0.9, 0.8, 1.0)), knowledge=(Knowledge.BATCH,))
    assert finding_of(attack("x"), Outcome("x", (batch,))).result is Result.HYPOTHETICAL
    quiet = figure("reid", Interval(0.0, -0.1, 0.1))
    found = finding_of(attack("x"), Outcome("x", (batch, quiet)))
    assert (found.result, found.headline) == (Result.HYPOTHETICAL, batch)


def test_one_of_many_settings_above_chance_by_a_little_is_chance() -> None:
    lucky, quiet = figure("reid", Interval(0.03, 0.001, 0.059)), figure("reid", Interval(0.0, -0.03, 0.03))
    alone, many = (finding_of(attack("x"), Outcome("x", (lucky, *more))) for more in ((), (quiet,) * 9))
    assert (alone.result, many.result) == (Result.LEAKED, Result.NOTHING)
    sure = figure("reid", Interval(0.03, 0.012, 0.048))
    assert finding_of(attack("x"), Outcome("x", (sure, *(quiet,) * 9))).result is Result.LEAKED


def test_the_page_loads_nothing() -> None:
    page = _page()
    assert not re.findall(r'(?:src|href)="(?!data:image/png;base64,|#)', page)
    assert "<script" not in page
    assert "@import" not in page
    assert "url(" not in page


def test_texts_can_not_become_markup() -> None:
    page = _page()
    assert "Reconstructions &lt;b&gt;" in page
    assert "--updates &lt;here&gt;" in page


def test_the_first_screen_says_what_was_found_and_what_was_not_tried() -> None:
    verdict = _page().split('id="verdict"')[1].split("</section>")[0]
    assert "1 of 3 attacks got something back from this update" in verdict
    assert "gate reid_gain&lt;0.02: FAILED" in verdict
    assert "classifier (61,000 numbers), generator (120,000 numbers); report fields accuracy, examples" in verdict
    assert "attack epsilon (the attacker needs labelled images of the same kind: give --auxiliary)" in verdict
    assert "3 frames that the observer could not keep up with" in verdict
    assert "not proven: its positive control failed" in verdict


def test_what_the_private_networks_started_from_is_said() -> None:
    told = "backbone public (sha256 abababababab, frozen), projection from the cohort secret"
    page = render(replace(SUBJECT, start=told), findings(), VERDICTS, "now")
    assert f"First weights of the private networks:</b> {told}." in page


def test_a_failed_control_is_said_where_its_attack_is() -> None:
    section = _page().split('id="memorisation"')[1].split("</section>")[0]
    assert "control FAILED" in section
    assert "a planted generator" in section


def test_ceilings_are_marked() -> None:
    section = _page().split('id="reidentification"')[1].split("</section>")[0]
    assert section.count('<tr class="given">') == 1
    assert "+20 points (+10 to +31)" in section
    assert "30.0 % (20.0 to 41.0)" in section


def test_the_report_is_json_with_every_figure() -> None:
    report = json.loads(json.dumps(report_of(SUBJECT, findings(), VERDICTS)))
    first = report["attacks"][0]
    assert [figure["is_ceiling"] for figure in first["figures"]] == [False, True]
    assert first["figures"][0]["gain"] == {"value": 0.2, "low": 0.1, "high": 0.31}
    assert report["gates"][0]["passed"] is False
    assert "pictures" not in first


def test_a_chart_draws_every_line_once_in_its_frame() -> None:
    drawing = str(svg(Curve("t", "x", "y", {"a": ((0.0, 1.0), (1.0, 3.0)), "b": ((0.0, 0.0), (1.0, 2.0))})))
    lines = re.findall(r'<polyline class="line l(\d)" points="([^"]+)"', drawing)
    assert [number for number, _ in lines] == ["0", "1"]
    # x = 54 + share * (460 - 54 - 14); y = 260 - 40 - y / 3 * (260 - 12 - 40).
    assert lines[0][1] == "54.0,150.7 446.0,12.0"
    assert svg(Curve("t", "x", "y", {})) == ""


def test_a_logarithmic_axis_starts_at_its_least_value() -> None:
    drawing = str(svg(Curve("t", "x", "y", {"a": ((0.0, 0.0), (0.1, 0.5), (1.0, 1.0))}, log_x=True)))
    (points,) = re.findall(r'points="([^"]+)"', drawing)
    assert points.split()[0].startswith("54.0,")
    assert points.split()[1].startswith(f"{54 + 2 / 3 * 392:.1f},")
