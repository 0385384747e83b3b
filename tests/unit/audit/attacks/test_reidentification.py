"""Re-identification: from a gradient it finds the right image when the extractor is known, from a whole update what was learnt by heart."""

from dataclasses import replace

import pytest
import torch

from audit.attacks.reidentification import LineUp, ranks
from audit.evidence.case import Case
from audit.measures import Figure, Outcome
from audit.techniques.gradients import batch_gradient
from tests.support.audit.cases import carried_out, outcome_of, simulated_case


def run(case: Case) -> Outcome:
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
    outcome = run(blind)
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
    controls = run(simulated_case(method="fedavg")).controls
    assert [control.passed for control in controls] == [at != failed for at in range(2)]


@pytest.mark.slow
def test_gradients_of_other_images_give_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_noise(spec, model, pixels, labels, parts):  # type: ignore[no-untyped-def]
        return batch_gradient(
            spec, model, torch.rand(pixels.shape, generator=torch.Generator().manual_seed(1)), labels, parts
        )

    monkeypatch.setattr("audit.techniques.gradients.batch_gradient", of_noise)
    (figure,) = by_extractor(run(simulated_case(method="fedavg")), GRADIENT).values()
    assert figure.gain.low < 0.02
