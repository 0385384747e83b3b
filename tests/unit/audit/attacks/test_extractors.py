"""What a known extractor gives away (re-identification), how outputs on probes give the extractor away, and frozen backbones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.attacks.reidentification import LineUp, ranks
from audit.evidence.case import Case, Extractor, Knowledge, read_secret
from audit.evidence.networks import estimated_extractor, with_lenet5
from audit.measures import Figure, Outcome
from fedcg.errors import FedcgError
from fedcg.learning.networks import load_part
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.split_names import WEIGHTS_VARIABLE
from fedcg.wire.parts import Part
from tests.support.audit import HELPED, carried_out, outcome_of, simulated_case
from tests.support.learning.networks import SPLIT, write_tiny_weights


def reidentified(case: Case) -> Outcome:
    return carried_out("reidentification", case)


def by_extractor(outcome: Outcome, observed: str) -> dict[str, Figure]:
    found = [figure for figure in outcome.figures if figure.setting.startswith(observed)]
    return {figure.setting.rpartition("extractor ")[2]: figure for figure in found}


GRADIENT, UPDATE = "one image's gradient", "whole update"


def test_ranks_by_hand_and_equal_distances_count_against_the_attack() -> None:
    rows = torch.tensor([3, 5, 9])
    found = [torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.2, 0.2])]
    line_ups = [LineUp(3, rows), LineUp(9, rows), LineUp(5, rows)]
    assert ranks(found, line_ups).tolist() == [1, 3, 3]
    assert ranks([-some for some in found], line_ups).tolist() == [3, 1, 3]


def test_the_true_extractor_finds_every_image_and_a_random_one_finds_none() -> None:
    outcome = outcome_of("reidentification", method="fedcg")
    assert all(control.passed for control in outcome.controls)
    found = by_extractor(outcome, GRADIENT)
    assert set(found) == {"true", "random", "start of the public seed", "surrogate"}
    assert found["true"].gain.low > 0.8
    assert found["random"].gain.low < 0.05
    assert found["random"].ceiling == found["true"].value.value
    # The floor is one in as many as there are candidates.
    assert 1 / 200 <= found["true"].floor <= 1 / 20


def test_a_whole_model_gives_every_image_away() -> None:
    (figure,) = by_extractor(outcome_of("reidentification", method="fedavg"), GRADIENT).values()
    assert figure.value.value > 0.9
    assert "sent (whole model)" in figure.setting


@pytest.mark.slow
def test_a_whole_update_is_tried_from_every_extractor_that_knows_something() -> None:
    case = simulated_case(method="fedcg")
    found = by_extractor(outcome_of("reidentification", method="fedcg"), UPDATE)
    assert set(found) == {"true", "start of the public seed", "surrogate"}
    assert {figure.is_of_update for figure in found.values()} == {True}
    assert found["surrogate"].samples == len(case.truth.train)
    assert found["surrogate"].ceiling == found["true"].value.value
    assert found["surrogate"].gain.low < 0.05


def test_without_the_private_networks_the_update_alone_is_tried() -> None:
    case = simulated_case(method="fedcg")
    blind = replace(case, truth=replace(case.truth, before=None, after=None))
    outcome = reidentified(blind)
    assert set(by_extractor(outcome, UPDATE)) == {"start of the public seed", "surrogate"}
    assert not by_extractor(outcome, GRADIENT)
    assert any("give --private" in note for note in outcome.notes)


@pytest.mark.parametrize(
    ("name", "broken", "failed"),
    [
        ("audit.techniques.gradients.revealed_features", lambda model, seen: torch.arange(400.0).sin(), 1),
        (
            "audit.attacks.reidentification.log_ratio",
            lambda target, pool, streams: torch.arange(float(len(pool))).sin().numpy(),
            0,
        ),
    ],
)
def test_a_control_fails_when_its_attack_is_broken(
    monkeypatch: pytest.MonkeyPatch, name: str, broken: object, failed: int
) -> None:
    monkeypatch.setattr(name, broken)
    controls = reidentified(simulated_case(method="fedavg")).controls
    assert [control.passed for control in controls] == [at != failed for at in range(2)]


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


def test_the_secret_is_read_from_a_store_and_from_a_simulation(tmp_path: Path) -> None:
    secret = bytes(range(32))
    (tmp_path / "initial.json").write_text(json.dumps({"cohort_root": secret.hex()}))
    (tmp_path / "cohort.key").write_bytes(secret + b"8 bytes.")
    assert read_secret(tmp_path / "initial.json") == read_secret(tmp_path / "cohort.key") == secret


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


@pytest.mark.slow
def test_positive_controls_have_their_own_network_and_attacks_work_on_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_tiny_weights(tmp_path)
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(tmp_path))
    case = simulated_case(
        network=SPLIT,
        weights=str(weights),
        freeze="all",
        image_size=64,
        normalise="imagenet",
        images_per_client=40,
        auxiliary=60,
    )
    assert set(initial_parts(case.view.spec, bytes(32))[Part.EXTRACTOR]) == {"project.bias", "project.weight"}
    assert all("project" not in name for name in initial_parts(with_lenet5(case.view.spec), bytes(32))[Part.EXTRACTOR])
    labels = carried_out("labels", case)
    assert labels.skipped is None
    assert labels.controls[0].passed
