"""A coordinator takes updates coded as its spec says, judges their decoded numbers, and goes on from its decoded aggregate."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load, save

from coordinator.aggregation.server_state import unpack_aggregate
from coordinator.errors import ValidationError
from coordinator.updates.robustness import Yardstick
from coordinator.updates.validation import Expected, base_in, max_update_bytes, validate_update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import spec_root
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifacts import (
    Base,
    artifact_id,
    decompress_payload,
    join_artifact,
    pack,
    read_header,
    split_artifact,
)
from fedcg.wire.artifacts.payload import MIN_CHANNEL
from fedcg.wire.parts import Part, UpdateCodec
from tests.support.coordinator.toy_artifacts import (
    aggregate_bytes,
    random_parts,
    shared_layouts,
    tiny_spec,
    update_header,
)
from tests.support.coordinator.world import RunningService, World
from tests.unit.coordinator.aggregation.test_aggregation import founded

SPEC = tiny_spec().model_copy(update={"codec": "i8-delta", "with_base": (Part.CLASSIFIER,)})
AGGREGATE = aggregate_bytes(SPEC, 0, 0, seed=1)
BASE_ID = artifact_id(AGGREGATE)
EXPECTED = Expected(SPEC.federation, 1, 1, "a", BASE_ID)
PARTS = random_parts(shared_layouts(SPEC), seed=2)


def base() -> Base:
    return base_in(AGGREGATE, SPEC, BASE_ID)


def packed(codec: UpdateCodec = "i8-delta") -> bytes:
    whole = base()
    known = Base(whole.id, {Part.CLASSIFIER: whole.parts[Part.CLASSIFIER]})
    return pack(update_header(SPEC, 1, 1, "a", BASE_ID), PARTS, codec, known)


def with_scales(change: Callable[[npt.NDArray[np.float32]], None]) -> bytes:
    head, frame = split_artifact(packed())
    pieces: dict[str, Any] = {key: array.copy() for key, array in load(decompress_payload(frame, 1 << 20)).items()}
    change(pieces["classifier/weight:scale"])
    return join_artifact(head, save(pieces))


def test_a_difference_is_decoded_against_the_aggregate_of_the_round() -> None:
    artifact = validate_update(packed(), SPEC, EXPECTED, base())
    assert artifact.header.codecs["classifier/weight"] == "i8-delta"
    np.testing.assert_allclose(artifact.parts[Part.CLASSIFIER]["weight"], PARTS[Part.CLASSIFIER]["weight"], atol=0.005)
    assert np.array_equal(artifact.parts[Part.GENERATOR]["weight"], PARTS[Part.GENERATOR]["weight"])


def test_a_difference_without_its_aggregate_is_rejected_with_the_digest() -> None:
    for other in (None, Base("0" * 64, base().parts)):
        with pytest.raises(ValidationError, match=BASE_ID):
            validate_update(packed(), SPEC, EXPECTED, other)


@pytest.mark.parametrize("codec", ["f32", "f16", "i8", "f16-delta"])
def test_an_update_coded_otherwise_than_the_spec_says_is_rejected(codec: UpdateCodec) -> None:
    with pytest.raises(ValidationError, match="not coded as they must be"):
        validate_update(packed(codec), SPEC, EXPECTED, base())


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_a_scale_that_is_no_scale_is_rejected_with_its_reason(scale: float) -> None:
    def spoil(scales: npt.NDArray[np.float32]) -> None:
        scales[1] = scale

    with pytest.raises(ValidationError, match="classifier/weight: the scale of channel 1"):
        validate_update(with_scales(spoil), SPEC, EXPECTED, base())


def test_the_distance_is_that_of_the_decoded_numbers() -> None:
    def enlarge(scales: npt.NDArray[np.float32]) -> None:
        scales[:] = 1e30

    yardstick = Yardstick(base(), {})
    parts = validate_update(with_scales(enlarge), SPEC, EXPECTED, yardstick.base).parts
    with pytest.raises(ValidationError, match=r"its classifier is .*e\+33 away from the round's base"):
        yardstick.check("a", yardstick.distances(parts))


def test_no_more_bytes_are_taken_than_the_codec_needs() -> None:
    assert len(packed()) <= max_update_bytes(SPEC) < max_update_bytes(SPEC.model_copy(update={"codec": "f32"}))


def test_a_federation_of_differences_runs_to_its_end(tmp_path: Path) -> None:
    with closing(World(tmp_path, SPEC, AGGREGATE)) as world, RunningService(world):
        world.start_devices()
        world.wait_event("finished")
    stored = [event["artifact"] for event in world.events("update_stored")]
    assert len(stored) == 4
    for artifact in stored:
        assert read_header(world.artifacts.get(artifact)).codecs["classifier/weight"] == "i8-delta"


def test_the_first_aggregate_is_the_decoded_one_for_both_sides(tmp_path: Path) -> None:
    ids, store = founded(tmp_path)
    spec = FederationSpec.parse(store.get(ids.spec))
    assert (spec.codec, spec.aggregate_codec) == ("i8-delta", "f16")
    method = get_method(spec.method)
    decoded = unpack_aggregate(store.get(ids.aggregate), spec, method).parts
    exact = method.init_server(spec, initial_parts(spec, spec_root(spec.seed))).aggregate.parts
    box = base_in(store.get(ids.aggregate), spec, ids.aggregate).parts
    for part, weights in exact.items():
        for name, tensor in weights.items():
            large = tensor.ndim > 1 and tensor[0].numel() >= MIN_CHANNEL
            assert decoded[part][name].equal(tensor.half().float() if large else tensor)
            assert np.array_equal(box[part][name], decoded[part][name].numpy())
