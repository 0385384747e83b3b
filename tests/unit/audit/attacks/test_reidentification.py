"""Re-identification finds the right image when the extractor is known, and only then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from audit.attacks import reidentification
from audit.attacks.attack import Effort
from audit.attacks.reidentification import ATTACK, LineUp, ranks
from audit.evidence.case import Case
from audit.evidence.observed_gradient import batch_gradient
from audit.measures.figures import Figure, Outcome
from fedcg.learning.image_set import ImageSet
from tests.support.audit.cases import simulated_case


def run(case: Case) -> Outcome:
    return ATTACK.run(case, Effort.QUICK, lambda done, total: None)


def by_extractor(outcome: Outcome) -> dict[str, Figure]:
    return {figure.setting.rpartition("extractor ")[2]: figure for figure in outcome.figures}


def test_ranks_by_hand_and_equal_distances_count_against_the_attack() -> None:
    rows = torch.tensor([3, 5, 9])
    found = [torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.1, 0.5, 0.9]), torch.tensor([0.2, 0.2, 0.2])]
    line_ups = [LineUp(3, rows), LineUp(9, rows), LineUp(5, rows)]
    assert ranks(found, line_ups).tolist() == [1, 3, 3]


def test_the_true_extractor_finds_every_image_and_a_random_one_finds_none() -> None:
    before = torch.get_rng_state()
    outcome = run(simulated_case(method="fedcg"))
    assert torch.equal(torch.get_rng_state(), before)
    (control,) = outcome.controls
    assert control.passed
    found = by_extractor(outcome)
    assert set(found) == {"true", "random", "start of the public seed", "surrogate"}
    assert found["true"].gain.low > 0.8
    assert found["random"].gain.low < 0.05
    assert found["random"].ceiling == found["true"].value.value
    # The floor is one in as many as there are candidates.
    assert 1 / 200 <= found["true"].floor <= 1 / 20


def test_a_whole_model_gives_every_image_away() -> None:
    (figure,) = run(simulated_case(method="fedavg")).figures
    assert figure.value.value > 0.9
    assert "sent (whole model)" in figure.setting


def test_the_control_fails_when_the_attack_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reidentification, "revealed_features", lambda model, seen: torch.arange(400.0).sin())
    (control,) = run(simulated_case(method="fedavg")).controls
    assert not control.passed


def test_gradients_of_other_images_give_no_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_noise(spec, model, pixels, labels, parts):  # type: ignore[no-untyped-def]
        return batch_gradient(
            spec, model, torch.rand(pixels.shape, generator=torch.Generator().manual_seed(1)), labels, parts
        )

    monkeypatch.setattr(reidentification, "batch_gradient", of_noise)
    (figure,) = run(simulated_case(method="fedavg")).figures
    assert figure.gain.low < 0.02


def test_the_same_case_gives_the_same_figures() -> None:
    case = simulated_case(method="fedavg")
    assert run(case).figures == run(case).figures


def test_a_class_needs_twenty_images_to_choose_from() -> None:
    case = simulated_case(method="fedavg")
    few = replace(
        case,
        view=replace(case.view, auxiliary=None),
        truth=replace(case.truth, train=first(case.truth.train), held_out=first(case.truth.held_out)),
    )
    assert "no class has 20 images" in (ATTACK.lacks(few) or "")
    assert ATTACK.lacks(case) is None


def first(images: ImageSet) -> ImageSet:
    return images.rows(range(10))
