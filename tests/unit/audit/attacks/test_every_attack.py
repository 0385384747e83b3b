"""What holds for every attack: it repeats itself, counts its steps, draws from streams of its own, and names what a case lacks."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from audit.attacks.attack import Effort, ceiling_control, get_attack
from audit.attacks.class_inference import target_class
from audit.choices import ATTACKS
from audit.evidence import Case, Knowledge
from audit.measures import Interval
from fedcg.learning.image_set import ImageSet
from tests.support.audit import TRANSLATING, WHOLE_MODEL, WITH_GENERATOR, attack, figure, outcome_of, simulated_case

Setting = dict[str, Any]
Change = Callable[[Case], Case]
QUICK: dict[str, Setting] = {
    "labels": {"method": "fedsplit"},
    "inversion": {"method": "fedsplit"},
    "reidentification": {"method": "fedavg"},
    "membership": {"method": "fedsplit", "network": "lenet5_relu"},
    "class_inference": WHOLE_MODEL,
    "memorisation": WITH_GENERATOR,
    "image_generator": TRANSLATING,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_it_repeats_itself_counts_its_steps_and_leaves_torchs_random_state_alone(name: str) -> None:
    case, state, steps = simulated_case(**QUICK[name]), torch.get_rng_state(), list[tuple[int, int]]()
    found = get_attack(name).run(case, Effort.QUICK, lambda done, total: steps.append((done, total)))
    assert found == outcome_of(name, **QUICK[name])
    assert torch.equal(torch.get_rng_state(), state)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1][0] == steps[-1][1]
    assert {total for _, total in steps} == {steps[0][1]}
    assert len({(one.name, one.setting) for one in found.figures}) == len(found.figures)
    assert all(one.value.low <= one.value.value <= one.value.high for one in found.figures)


def test_the_gradient_of_a_rounds_only_step_is_its_update_unless_dp_sgd_adds_noise() -> None:
    case = simulated_case(method="fedsplit")
    found = replace(figure("x", Interval(0, 0, 0)), knowledge=(Knowledge.BATCH,), rows=len(case.truth.train))
    single = replace(found, setting="single images", rows=1)
    spec = case.view.spec.model_copy(update={"params": {**case.view.spec.params, "steps": 1}})
    short = seen(spec=spec)(case)
    for one, is_of_update in ((case, False), (short, True), (true(privacy=None)(short), False)):
        outcome = replace(attack("x"), carry_out=lambda _: [found, single]).run(
            one, Effort.QUICK, lambda done, total: None
        )
        assert [one.is_of_update for one in outcome.figures] == [is_of_update, False]


@pytest.mark.parametrize(("chances", "passed"), [((0.4, 0.004), False), ((0.4, 0.006), True)])
def test_an_estimated_extractor_proves_nothing_where_the_devices_own_finds_more(
    chances: tuple[float, ...], passed: bool
) -> None:
    case = simulated_case(**WITH_GENERATOR)
    (control,) = ceiling_control(case, "mia_auc", 0.7, chances)  # of two figures: 0.004 counts as 0.008
    assert (control.passed, control.figure) == (passed, "mia_auc")  # type: ignore[union-attr]
    assert list(ceiling_control(case, "mia_auc", 0.0, [])) == [
        "Whether the device's own extractor would find more is not known: give --private."
    ]
    assert not list(ceiling_control(simulated_case(**WHOLE_MODEL), "mia_auc", 0.7, chances))


def test_every_attack_is_tried_here_but_the_one_that_a_quick_audit_leaves_out() -> None:
    assert QUICK.keys() == ATTACKS.keys() - {"epsilon"}
    left_out = get_attack("epsilon").run(simulated_case(method="fedcg"), Effort.QUICK, lambda done, total: None)
    assert "default or thorough" in (left_out.skipped or "")


def seen(**changed: object) -> Change:
    """The case with another view."""
    return lambda case: replace(case, view=replace(case.view, **changed))  # type: ignore[arg-type]


def true(**changed: object) -> Change:
    """The case with another truth."""
    return lambda case: replace(case, truth=replace(case.truth, **changed))  # type: ignore[arg-type]


blind, bare, silent = true(before=None, after=None), seen(auxiliary=None), seen(update={})


def held_out(count: int) -> Change:
    return lambda case: true(held_out=case.truth.held_out.rows(range(count)))(case)


def of_few_images(case: Case) -> Case:
    few = {name: getattr(case.truth, name).rows(range(10)) for name in ("train", "held_out")}
    return bare(true(**few)(case))


def of_class(images: ImageSet, label: int) -> ImageSet:
    return images.rows(torch.nonzero(images.labels == label).flatten())


def of_other_classes(case: Case) -> Case:
    return true(train=of_class(case.truth.train, 0), held_out=of_class(case.truth.held_out, 1))(case)


def of_one_class(case: Case) -> Case:
    assert case.view.auxiliary is not None
    return seen(auxiliary=of_class(case.view.auxiliary, target_class(case.truth)))(case)


@pytest.mark.parametrize(
    ("name", "setting", "change", "why"),
    [
        ("labels", {"method": "fedper"}, seen(), "fedper sends no classifier"),
        ("labels", {"method": "fedcg"}, blind, None),
        ("inversion", {"method": "fedsplit"}, blind, "give --private"),
        ("inversion", {"method": "fedsplit"}, silent, "fedsplit sends no classifier"),
        ("inversion", {"method": "fedavg"}, true(before=None), None),
        ("reidentification", {"method": "fedcg"}, blind, None),
        (
            "reidentification",
            {"method": "fedavg"},
            of_few_images,
            "no class of the device has 19 images that it did not",
        ),
        ("membership", {"method": "fedcg"}, bare, "give --auxiliary"),
        ("membership", {"method": "fedcg"}, held_out(4), "--held-out"),
        ("membership", {"method": "fedcg"}, silent, "fedcg sends no classifier"),
        ("class_inference", WHOLE_MODEL, of_one_class, "images of other classes"),
        ("class_inference", WHOLE_MODEL, silent, "fedavg sends no classifier"),
        ("memorisation", {"method": "fedsplit"}, seen(), "fedsplit sends no generator"),
        ("memorisation", WITH_GENERATOR, bare, None),
        ("memorisation", WITH_GENERATOR, lambda case: blind(bare(case)), "give --auxiliary"),
        ("memorisation", WITH_GENERATOR, held_out(1), "--held-out"),
        ("memorisation", WITH_GENERATOR, of_other_classes, "no class has both training images and other images"),
        ("image_generator", {"method": "fedcg"}, seen(), "fedcg sends no image_generator"),
        pytest.param("image_generator", TRANSLATING, bare, "give --auxiliary", marks=pytest.mark.slow),
        ("epsilon", {"method": "fedcg"}, blind, "give --private"),
        ("epsilon", {"method": "fedcg"}, seen(), None),
    ],
)
def test_what_a_case_lacks_is_named_with_a_remedy(name: str, setting: Setting, change: Change, why: str | None) -> None:
    missing = get_attack(name).lacks(change(simulated_case(**setting)))
    assert (missing is None) if why is None else (why in (missing or ""))
