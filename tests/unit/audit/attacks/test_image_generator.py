"""What PPIDSG's shared generator gives away: members, by how far the round moved its outputs; not more where there is nothing to find."""

from dataclasses import replace

import pytest
import torch

from audit.attacks import image_generator
from audit.attacks.image_generator import Movement, maker, right_blocks
from audit.evidence.case import Case
from audit.evidence.device_data import joined
from audit.measures import Figure, Outcome, unit_pixels
from fedcg.learning.methods.ppidsg import SCRAMBLING, scrambling_by
from fedcg.wire.parts import Part
from tests.support.audit.cases import TRANSLATING, carried_out, outcome_of, simulated_case


def translating_case() -> Case:
    return simulated_case(**TRANSLATING)


def named(outcome: Outcome, name: str) -> list[Figure]:
    return [one for one in outcome.figures if one.name == name]


@pytest.mark.slow
def test_members_are_told_by_how_far_the_round_moved_the_output() -> None:
    outcome = outcome_of("image_generator", **TRANSLATING)
    assert outcome.is_proven("mia_auc")
    assert [one.setting for one in named(outcome, "mia_auc")] == [
        "movement of its output",
        "movement of its output beside the other clients'",
    ]
    assert all(one.gain.low > 0.05 for one in named(outcome, "mia_auc"))


@pytest.mark.slow
def test_shuffling_which_images_were_trained_on_leaves_no_gain() -> None:
    case = translating_case()
    both = joined(case.truth.train, case.truth.held_out)
    order = torch.randperm(len(both), generator=torch.Generator().manual_seed(5))
    inside, outside = (both.rows(some) for some in order.chunk(2))
    shuffled = replace(case, truth=replace(case.truth, train=inside, held_out=outside))
    found = carried_out("image_generator", shuffled)
    assert all(one.gain.low <= 0 for one in named(found, "mia_auc"))


@pytest.mark.slow
def test_the_key_is_tried_where_it_was_given_and_a_planted_generator_shows_it_whole() -> None:
    case, outcome = translating_case(), outcome_of("image_generator", **TRANSLATING)
    (figure,) = named(outcome, "scrambled_blocks")
    assert figure.samples == 16
    assert outcome.is_proven("scrambled_blocks")
    known, true = case.view.auxiliary, scrambling_by(case.view.spec, case.truth.extras[SCRAMBLING])
    assert known is not None
    assert right_blocks(lambda images: unit_pixels(true.encrypt(images)), true, known, 4) == (16, 16)
    without = carried_out("image_generator", replace(case, truth=replace(case.truth, extras={})))
    assert not named(without, "scrambled_blocks")
    assert "its keys were not given" in without.notes[-1]


@pytest.mark.slow
def test_a_control_whose_client_learns_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    case = translating_case()
    assert image_generator.membership_control(case, case.streams).passed
    idle = replace(case.view, update={Part.IMAGE_GENERATOR: case.view.before.parts[Part.IMAGE_GENERATOR]})
    monkeypatch.setattr("audit.evidence.networks.of_simulated_client", lambda *some: idle)
    assert not image_generator.membership_control(case, case.streams).passed


@pytest.mark.slow
def test_an_output_that_no_round_moved_has_the_lowest_score() -> None:
    view = translating_case().view
    assert view.auxiliary is not None
    images = view.auxiliary.images[:20]
    own, before = (maker(view, some[Part.IMAGE_GENERATOR]) for some in (view.update, view.before.parts))
    moved, still = (Movement(one, before, ()).scores(images)["movement of its output"] for one in (own, before))
    assert (moved > still).all()
