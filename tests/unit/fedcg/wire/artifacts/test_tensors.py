import json
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import save

from fedcg.wire.artifacts.artifacts import codecs_for
from fedcg.wire.artifacts.payload import (
    Array,
    assert_finite,
    decode_tensors,
    encode_tensors,
    layouts_of,
    max_payload_bytes,
)
from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError, WireError
from fedcg.wire.parts import Part, PartLayouts, TensorLayout

ARRAYS = st.sampled_from(["<f4", "<i8"]).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
NAMES = st.from_regex(r"[A-Za-z0-9_.]{1,12}", fullmatch=True)
PARTS = st.dictionaries(st.sampled_from(Part), st.dictionaries(NAMES, ARRAYS, max_size=4))


def classifier(**arrays: object) -> dict[Part, dict[str, Array]]:
    return {Part.CLASSIFIER: cast(dict[str, Array], arrays)}


WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
COUNT = np.array(7, dtype=np.int64)
PAIR = classifier(weight=WEIGHT, count=COUNT)
LAYOUTS = layouts_of(PAIR)


def encoded(parts: dict[Part, dict[str, Array]]) -> bytes:
    return encode_tensors(parts, codecs_for(layouts_of(parts)))


def decoded(data: bytes, layouts: PartLayouts = LAYOUTS) -> dict[Part, dict[str, Array]]:
    return decode_tensors(data, layouts, codecs_for(layouts))


@given(PARTS)
def test_tensors_survive_the_wire_bit_for_bit(parts: dict[Part, dict[str, Array]]) -> None:
    data, layouts = encoded(parts), layouts_of(parts)
    assert len(data) <= max_payload_bytes(layouts, codecs_for(layouts))
    found = decoded(data, layouts)
    assert found.keys() == parts.keys()
    for part, arrays in parts.items():
        assert found[part].keys() == arrays.keys()
        for name, array in arrays.items():
            again = found[part][name]
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert again.tobytes() == array.tobytes()
            assert again.flags.writeable


@pytest.mark.parametrize("dtype", ["<f8", "<f2", "<i4", "u1", ">f4", "?"])
def test_only_float32_and_int64_cross_the_wire(dtype: str) -> None:
    with pytest.raises(MalformedError, match="classifier/weight"):
        encoded(classifier(weight=WEIGHT.astype(dtype)))


@pytest.mark.parametrize(
    "parts",
    [
        classifier(weight=WEIGHT),
        classifier(weight=WEIGHT, count=COUNT, extra=np.zeros(1, np.float32)),
        classifier(other=WEIGHT, count=COUNT),
        classifier(weight=WEIGHT.T, count=COUNT),
        classifier(weight=WEIGHT.reshape(6), count=COUNT),
        classifier(weight=WEIGHT.reshape(1, 6), count=COUNT),
        classifier(weight=WEIGHT[:1], count=COUNT),
        classifier(weight=np.zeros(3, np.int64), count=COUNT),
        {Part.EXTRACTOR: PAIR[Part.CLASSIFIER]},
        {**PAIR, Part.EXTRACTOR: {"weight": WEIGHT}},
        {},
    ],
)
def test_tensors_other_than_those_of_the_layouts_are_refused(parts: dict[Part, dict[str, Array]]) -> None:
    with pytest.raises((IntegrityError, MalformedError)):
        decoded(encoded(parts))


def test_a_same_sized_tensor_of_another_name_is_named_in_the_error() -> None:
    with pytest.raises(IntegrityError, match="classifier/weighs"):
        decoded(encoded(classifier(weighs=WEIGHT, count=COUNT)))


def test_a_hidden_message_in_the_metadata_is_refused() -> None:
    data = save({"classifier/weight": WEIGHT, "classifier/count": COUNT}, metadata={"note": "x"})
    with pytest.raises(IntegrityError, match="__metadata__"):
        decoded(data)


def test_a_payload_over_its_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLargeError):
        decoded(b"{" * (max_payload_bytes(LAYOUTS, codecs_for(LAYOUTS)) + 1))


def test_a_header_that_lies_about_its_length_is_refused() -> None:
    data = encoded(PAIR)
    for length in (0, 1, 2**40, 2**64 - 1):
        with pytest.raises((IntegrityError, MalformedError)):
            decoded(length.to_bytes(8, "little") + data[8:])


def test_a_header_nested_too_deeply_for_the_parser_is_refused() -> None:
    layouts: PartLayouts = {
        Part.CLASSIFIER: tuple(TensorLayout(name=f"w{n}", dtype="float32", shape=(1,)) for n in range(999))
    }
    head = b"[" * 200_000
    with pytest.raises(MalformedError, match="not JSON"):
        decoded(len(head).to_bytes(8, "little") + head + bytes(4 * 999), layouts)


def test_overlapping_tensors_are_refused() -> None:
    layouts: PartLayouts = {
        Part.CLASSIFIER: tuple(TensorLayout(name=name, dtype="float32", shape=(2,)) for name in ("a", "b"))
    }
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    head = json.dumps({"classifier/a": entry, "classifier/b": entry}).encode()
    data = len(head).to_bytes(8, "little") + head + bytes(16)
    with pytest.raises(MalformedError):
        decoded(data, layouts)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_never_crashes_the_decoder(position: int, change: int) -> None:
    data = bytearray(encoded(PAIR))
    data[position % len(data)] ^= change
    try:
        found = decoded(bytes(data))
    except WireError:
        return
    assert {name: array.shape for name, array in found[Part.CLASSIFIER].items()} == {"weight": (2, 3), "count": ()}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_tensor_that_is_not_finite_is_named(bad: float) -> None:
    assert_finite(PAIR)
    broken = WEIGHT.copy()
    broken[1, 2] = bad
    with pytest.raises(IntegrityError, match="classifier/weight"):
        assert_finite(classifier(weight=broken, count=COUNT))
