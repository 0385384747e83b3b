"""A spec's bytes are its name: what came later must not rename what was founded before."""

import json

import pytest
from pydantic import ValidationError

from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import BackboneChoice, FederationPlan, FederationSpec, NetworkChoice
from fedcg.wire.parts import Part, UpdateCodec
from tests.support.learning.learning_cases import plan, quick_spec, usual_plan


def coded(method: str, codec: UpdateCodec) -> FederationSpec:
    return complete_spec(usual_plan(method).model_copy(update={"codec": codec, "aggregate_codec": "f32"}))


def test_a_spec_founded_before_there_were_codecs_keeps_its_bytes_and_means_float32() -> None:
    spec = coded("fedcg", "f32")
    fields = json.loads(spec.canonical())
    assert fields["codec"] == "f32"
    assert not fields.keys() & {"aggregate_codec", "with_base", "augment_crop"}
    again = FederationSpec.parse(spec.canonical())
    assert (again.codec, again.aggregate_codec, again.with_base) == ("f32", "f32", ())
    assert again.digest == spec.digest


def test_codecs_are_a_part_of_a_specs_name() -> None:
    digests = {coded("fedcg", codec).digest for codec in ("f32", "i8", "i8-delta")} | {quick_spec("fedcg").digest}
    assert len(digests) == 4
    parsed = FederationSpec.parse(quick_spec("fedcg").canonical())
    assert (parsed.codec, parsed.aggregate_codec) == ("i8-delta", "f16")
    assert parsed.with_base == (Part.CLASSIFIER, Part.GENERATOR)


def test_only_what_a_round_goes_on_from_is_taken_to_the_aggregate() -> None:
    bases = {name: set(coded(name, "i8-delta").with_base) for name in method_names()}
    assert bases["fedmd_cg"] == bases["fedgen"] == bases["fedsplit"] == {Part.CLASSIFIER}
    assert bases["fedavg"] == {Part.EXTRACTOR, Part.CLASSIFIER}
    assert bases["local"] == set()
    for name in method_names():
        assert bases[name] <= get_method(name).payload.up & get_method(name).payload.down
        assert coded(name, "i8").with_base == ()


def test_a_plan_names_codecs_that_exist() -> None:
    values = plan("fedcg").model_dump()
    for field, codec in (("codec", "i4"), ("aggregate_codec", "i8"), ("aggregate_codec", "f16-delta")):
        with pytest.raises(ValidationError, match=field):
            FederationPlan.model_validate({**values, field: codec})


@pytest.mark.parametrize(
    ("network", "has_secret", "words"),
    [
        (NetworkChoice(), True, "cohort secret"),
        (NetworkChoice(), False, "public spec seed"),
        (NetworkChoice(), None, "cohort secret, or the public spec seed on a device without one"),
        (NetworkChoice(split="resnet18+project:16"), False, "public spec seed"),
        (
            NetworkChoice(split="resnet18+project:16", weights="ab" * 32, freeze="all"),
            True,
            "backbone public (sha256 abababababab, frozen), projection from the cohort secret",
        ),
        (
            NetworkChoice(
                split="resnet18+project:16",
                backbones=(BackboneChoice(name="resnet34", weights="cd" * 32),),
            ),
            False,
            "resnet18: public spec seed; resnet34: backbone public (sha256 cdcdcdcdcdcd, trained on), projection from the public spec seed",
        ),
    ],
)
def test_what_is_public_of_a_private_start_is_worded(
    network: NetworkChoice, has_secret: bool | None, words: str
) -> None:
    assert network.private_start(has_secret) == words
