"""Extractor recovery: outputs on known probes give an extractor away, a mean of four boxes' outputs gives the mean; what must be there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.attacks import membership, reidentification
from audit.attacks.attack import Effort
from audit.attacks.extractor_recovery import ATTACK
from audit.evidence.case import Case, Knowledge
from audit.evidence.colluder import read_secret
from audit.evidence.networks import Extractor, estimated_extractor
from audit.measures.figures import Outcome
from fedcg.errors import FedcgError
from fedcg.learning.networks import load_part
from fedcg.learning.seeds import Streams
from fedcg.wire.parts import Part
from tests.support.audit.cases import simulated_case
from tests.support.audit.recordings import write_images, write_private, write_recording
from tests.support.commands import data_of, run_fedcg


def helped() -> Case:
    return simulated_case(method="fedprobe", clients=4, images_per_client=60, helped=True)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    assert ATTACK.lacks(helped()) is None
    return ATTACK.run(helped(), Effort.QUICK, lambda done, total: None)


@pytest.mark.slow
def test_own_outputs_give_the_extractor_away_and_a_mean_gives_the_mean(outcome: Outcome) -> None:
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
    found = ATTACK.run(replace(case, view=replace(case.view, before=base)), Effort.QUICK, lambda done, total: None)
    assert found.figures[1].value.value > 0.99


def test_what_is_missing_is_named() -> None:
    case = helped()
    unhelped = replace(case, view=replace(case.view, colluder=None))
    assert "give --cohort" in str(ATTACK.lacks(unhelped))
    blind = replace(case, truth=replace(case.truth, after=None))
    assert "give --private" in str(ATTACK.lacks(blind))
    assert "adds up no outputs" in str(ATTACK.lacks(simulated_case()))
    empty = replace(case.view.before, parts={**case.view.before.parts, **zeros(case)})
    assert "no sum was opened" in str(ATTACK.lacks(replace(case, view=replace(case.view, after=empty))))


def zeros(case: Case) -> dict[Part, dict[str, torch.Tensor]]:
    return {Part.STATISTICS: {name: one * 0 for name, one in case.view.update[Part.STATISTICS].items()}}


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
    for attack in (membership.ATTACK, reidentification.ATTACK):
        found = attack.run(helped(), Effort.QUICK, lambda done, total: None)
        settings = [one for one in found.figures if Knowledge.COLLUDER in one.knowledge]
        assert settings, attack.name
        assert all(Extractor.COLLUDER.value in one.setting for one in settings)


@pytest.mark.slow
def test_the_command_reads_the_secret_of_a_store_or_of_a_simulation(tmp_path: Path) -> None:
    case = helped()
    assert case.view.colluder is not None
    write_recording(case, tmp_path / "home")
    write_images(case.truth.train, case.truth.held_out, tmp_path / "data.npz")
    write_private(case, tmp_path / "private.safetensors")
    (tmp_path / "initial.json").write_text(json.dumps({"cohort_root": case.view.colluder.secret.hex()}))
    (tmp_path / "cohort.key").write_bytes(case.view.colluder.secret + b"8 bytes.")
    assert read_secret(tmp_path / "cohort.key") == case.view.colluder.secret
    given = (
        "--updates",
        tmp_path / "home",
        "--data",
        tmp_path / "data.npz",
        "--private",
        tmp_path / "private.safetensors",
    )
    words = (
        "audit",
        "run",
        *given,
        "--client",
        "client-1",
        "--attacks",
        "extractor",
        "--effort",
        "quick",
        "--processes",
        1,
    )
    done = run_fedcg(*words, "--out", tmp_path / "out", "--cohort", tmp_path / "initial.json", "--json")
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
