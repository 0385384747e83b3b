"""What a known extractor gives away (re-identification), what a helping box adds to that, and frozen backbones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from audit.attacks.reidentification import LineUp, chance_of_update, ranks
from audit.evidence.case import Extractor, read_secret
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


def test_ranks_of_images_that_share_candidates_are_not_independent() -> None:
    # One class: 2 training images, 2 others of the device, 1 auxiliary image, all with the same two other candidates above
    # or below: of two and two in random order both training images are before the others with 1/2 · 1/3 = 1/6, at least one with 1/2.
    rows, labels = torch.tensor([0, 2, 3, 4]), torch.zeros(5, dtype=torch.int64)
    line_ups = [LineUp(0, rows), LineUp(1, torch.tensor([1, 2, 3, 4]))]
    both = [torch.tensor([0.1, 0.5, 0.6, 0.9]), torch.tensor([0.2, 0.5, 0.6, 0.9])]
    one = [both[0], torch.tensor([0.55, 0.5, 0.6, 0.9])]
    assert chance_of_update(both, line_ups, labels, 4) == pytest.approx((1 / 6, 1 / 6))
    assert chance_of_update(one, line_ups, labels, 4) == pytest.approx((1 / 2, 1 / 6))
    assert chance_of_update([-some for some in both], line_ups, labels, 4).p == 1.0
    # An auxiliary image that is nearer than all but one leaves one place: the second can't be reached by chance either.
    near = [torch.tensor([0.1, 0.5, 0.6, 0.15]), torch.tensor([0.2, 0.5, 0.6, 0.15])]
    assert chance_of_update(near, line_ups, labels, 4).p == pytest.approx(1 / 2)


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
    assert figure.least_p < 1e-9


def test_without_the_private_networks_the_update_alone_is_tried() -> None:
    case = simulated_case(method="fedcg")
    outcome = carried_out("reidentification", replace(case, truth=replace(case.truth, before=None, after=None)))
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
    controls = carried_out("reidentification", simulated_case(method="fedavg")).controls
    assert [control.passed for control in controls] == [at != failed for at in range(2)]


def test_a_colluder_knows_the_cohorts_start() -> None:
    case = simulated_case(**HELPED)
    assert case.view.colluder is not None
    found = estimated_extractor(case.view, Extractor.COLLUDER, {}, Streams(bytes(32)))
    start = initial_parts(case.view.spec, case.view.colluder.secret)[Part.EXTRACTOR]
    assert all(torch.equal(found[name], start[name]) for name in start)
    assert not any(torch.equal(found[name], one) for name, one in case.view.start()[Part.EXTRACTOR].items())
    load_part(case.view.spec, Part.EXTRACTOR, found)
    with pytest.raises(ValueError, match="no device of the cohort helps"):
        estimated_extractor(replace(case.view, colluder=None), Extractor.COLLUDER, {}, Streams(bytes(32)))


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
