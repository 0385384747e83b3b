"""Extractor recovery: outputs on known probes give an extractor away, a mean of four boxes' outputs gives the mean; what must be there."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.evidence.case import Case, Extractor, Knowledge, read_secret
from audit.evidence.networks import estimated_extractor
from fedcg.errors import FedcgError
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part
from tests.support.audit.cases import HELPED, carried_out, outcome_of, simulated_case
from tests.support.audit.recordings import audit_command, write_case
from tests.support.commands import data_of, run_fedcg


def helped() -> Case:
    return simulated_case(**HELPED)


@pytest.mark.slow
def test_own_outputs_give_the_extractor_away_and_a_mean_gives_the_mean() -> None:
    outcome = outcome_of("extractor", **HELPED)
    mean, difference, own = outcome.figures
    assert outcome.controls[0].passed
    assert own.value.value > 0.99
    assert not own.is_possible
    assert own.floor < mean.value.value < own.value.value  # it holds this device's quarter
    assert mean.gain.high < own.gain.low
    assert mean.ceiling == difference.ceiling == own.value.value
    assert Knowledge.COLLUDER in mean.knowledge
    assert difference.is_possible


@pytest.mark.slow
def test_a_difference_of_rounds_is_a_devices_outputs_where_the_others_stand_still() -> None:
    case = helped()
    after, before = case.truth.after, case.truth.before
    assert case.view.colluder is not None and after is not None and before is not None  # noqa: PT018
    # The earlier sum is this round's, with the outputs that the device had told in the earlier one.
    sums, statistics = case.view.after, Part.STATISTICS
    assert sums is not None
    told = {name: case.view.update[statistics][name] for name in ("outputs", "weight")}
    earlier = case.view.colluder.counted(before[Part.EXTRACTOR], len(case.truth.train))
    still = {name: sums.parts[statistics][name] - told[name] + earlier[name] for name in told}
    base = replace(case.view.before, parts={**case.view.before.parts, statistics: still})
    found = carried_out("extractor", replace(case, view=replace(case.view, before=base)))
    assert found.figures[1].value.value > 0.99


def test_a_colluder_knows_the_cohorts_start_where_there_are_no_probes() -> None:
    case = simulated_case(method="fedsplit", helped=True)
    assert case.view.colluder is not None
    found = estimated_extractor(case.view, Extractor.COLLUDER, {}, Streams(bytes(32)))
    start = case.view.colluder.start()
    assert all(torch.equal(found[name], start[name]) for name in start)
    load_part(case.view.spec, Part.EXTRACTOR, found)
    with pytest.raises(ValueError, match="no box of the cohort helps"):
        estimated_extractor(replace(case.view, colluder=None), Extractor.COLLUDER, {}, Streams(bytes(32)))


@pytest.mark.slow
def test_other_attacks_use_what_the_colluder_knows() -> None:
    for attack in ("membership", "reidentification"):
        settings = [one for one in outcome_of(attack, **HELPED).figures if Knowledge.COLLUDER in one.knowledge]
        assert settings, attack
        assert all(Extractor.COLLUDER.value in one.setting for one in settings)


@pytest.mark.slow
def test_the_command_reads_the_secret_of_a_store_or_of_a_simulation(tmp_path: Path) -> None:
    case = helped()
    assert case.view.colluder is not None
    write_case(case, tmp_path)
    (tmp_path / "initial.json").write_text(json.dumps({"cohort_root": case.view.colluder.secret.hex()}))
    (tmp_path / "cohort.key").write_bytes(case.view.colluder.secret + b"8 bytes.")
    assert read_secret(tmp_path / "cohort.key") == case.view.colluder.secret
    chosen = ("--attacks", "extractor", "--cohort", tmp_path / "initial.json", "--json")
    done = run_fedcg(*audit_command(tmp_path, tmp_path / "out", *chosen))
    assert done.exit_code == 0, done.output
    (found,) = data_of(done.stdout)["attacks"]
    assert found["figures"][2]["value"]["value"] > 0.99


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"short", "holds no cohort's secret"),
        (b"{}", "holds no cohort's secret"),
        (b'{"cohort_root": null}', "run it with --start cohort"),
        (b'{"cohort_root": "zz"}', "holds no cohort's secret"),
        (bytes(500), "holds no cohort's secret"),
    ],
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(FedcgError, match=said):
        read_secret(tmp_path / "file")
