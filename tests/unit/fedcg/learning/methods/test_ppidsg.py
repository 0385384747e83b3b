"""PPIDSG as a method: one generator is shared, the classifier starts from its key, scrambling keys stay with the box."""

from dataclasses import replace

import pytest
import torch

from edge_client.config import PolicySection
from edge_client.firewall import check_spec
from fedcg.learning.errors import NetworkError
from fedcg.learning.method import ClientState, LocalResult
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.spec import NetworkChoice
from fedcg.learning.training.evaluation import evaluate
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part
from tests.support.learning.learning_cases import GREY, bright_images, context, plan, plan_of, quick_spec, same

METHOD = get_method("ppidsg")
SPEC = quick_spec("ppidsg")
COHORT = quick_spec("ppidsg", key="cohort")


def start(spec=SPEC) -> ClientState:  # type: ignore[no-untyped-def]
    return METHOD.init_client(spec, initial_parts(spec, b"cohort"))


def trained(state: ClientState, number: int = 1, root: bytes = b"device", spec=SPEC) -> LocalResult:  # type: ignore[no-untyped-def]
    return METHOD.local_round(state, bright_images(24, 0), None, context(spec, number, root))


def test_the_generator_alone_is_shared_and_no_key_is_in_it() -> None:
    result = trained(start())
    assert set(result.shared.parts) == {Part.IMAGE_GENERATOR}
    layout = {one.name for one in SPEC.layouts[Part.IMAGE_GENERATOR]}
    assert result.shared.parts[Part.IMAGE_GENERATOR].keys() == layout
    assert set(result.private.extras) == {"key", "scrambling", "discriminator"}


def test_the_classifier_starts_every_round_from_its_key() -> None:
    first, key = trained(start()).private, start().extras["key"]
    assert same(first.extras["key"], key)
    assert not same(key, initial_parts(SPEC, b"cohort")[Part.CLASSIFIER])  # that one is public
    assert not same(key, METHOD.init_client(SPEC, initial_parts(SPEC, b"another")).extras["key"])
    assert not same(first.parts[Part.CLASSIFIER], key)
    other = {name: torch.zeros_like(tensor) for name, tensor in first.parts[Part.CLASSIFIER].items()}
    moved = replace(first, parts={**first.parts, Part.CLASSIFIER: other})
    one, two = (trained(state, 2).private for state in (first, moved))
    assert same(one.parts[Part.CLASSIFIER], two.parts[Part.CLASSIFIER])
    assert not same(
        trained(replace(first, extras={**first.extras, "key": other}), 2).private.parts[Part.CLASSIFIER],
        one.parts[Part.CLASSIFIER],
    )


def test_a_box_keeps_its_scrambling_and_each_has_another() -> None:
    first, neighbour = trained(start()).private, trained(start(), root=b"neighbour").private
    assert same(trained(first, 2).private.extras["scrambling"], first.extras["scrambling"])
    assert not same(neighbour.extras["scrambling"], first.extras["scrambling"])


def test_with_a_cohorts_key_all_boxes_scramble_alike_and_other_cohorts_otherwise() -> None:
    one, two = (trained(start(COHORT), root=root, spec=COHORT).private.extras["scrambling"] for root in (b"a", b"b"))
    assert same(one, two)
    elsewhere = METHOD.init_client(COHORT, initial_parts(COHORT, b"another")).extras["scrambling"]
    assert not same(one, elsewhere)


def test_the_steps_that_are_asked_for_are_those_that_are_imitated() -> None:
    plain, turned = (
        trained(start(), spec=quick_spec("ppidsg", scrambling=steps)).shared.parts[Part.IMAGE_GENERATOR]
        for steps in ("IA", "IR")
    )
    assert not same(plain, turned)


def test_the_model_is_generator_extractor_and_classifier_in_this_order() -> None:
    parts = trained(start()).private.parts
    model, images = personal_model(SPEC, parts), torch.rand(2, 1, 16, 16) * 2 - 1
    generator, extractor, classifier = model.children()
    assert torch.equal(model(images), classifier(extractor(generator(images))))
    assert generator(images).shape == images.shape
    assert evaluate(SPEC, parts, bright_images(24, 1)).images == 24


@pytest.mark.parametrize(
    ("plan_", "problem"),
    [
        (plan("ppidsg"), "network.split must be image_small or image_paper"),
        (plan_of("ppidsg", NetworkChoice(split="image_small"), GREY, {}), "set every one to 0.5"),
        (
            plan_of(
                "ppidsg", NetworkChoice(split="image_small"), GREY.model_copy(update={"std": (0.5,)}), {"block": 5}
            ),
            "block = 5 does not divide images of 16x16",
        ),
        (
            plan_of(
                "ppidsg",
                NetworkChoice(split="image_small"),
                GREY.model_copy(update={"std": (0.5,)}),
                {"scrambling": "IR,IC"},
            ),
            "IC permutes the channels of colour images",
        ),
    ],
)
def test_a_federation_it_can_not_work_in_is_refused_with_the_setting(plan_, problem: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(NetworkError, match=problem):
        complete_spec(plan_)


def test_a_device_declines_an_image_generator_until_its_owner_lists_it() -> None:
    refused = check_spec(SPEC, PolicySection())
    assert refused is not None
    assert refused[0] is DeclineReason.UPLOAD_NOT_ALLOWED
    assert "image_generator (a network that takes images" in refused[1]
    assert check_spec(SPEC, PolicySection(allow_upload=frozenset({Part.IMAGE_GENERATOR}))) is None
