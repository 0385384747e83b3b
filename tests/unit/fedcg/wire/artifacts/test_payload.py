"""The laws of `fedcg.wire.artifacts.payload`: tensors to bytes and back, for any finite numbers, and what is refused."""

import json
from typing import Any, cast, get_args

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from safetensors.numpy import load, save

from fedcg.wire.artifacts import artifacts, payload
from fedcg.wire.artifacts.artifacts import Base, codecs_for, pack, unpack
from fedcg.wire.artifacts.inspection import decode, inspect
from fedcg.wire.artifacts.payload import Array, decode_tensor, encode_tensor, encode_tensors, layouts_of
from fedcg.wire.errors import CodecError, IntegrityError, MalformedError, TooLargeError, UnknownBaseError, WireError
from fedcg.wire.parts import Part, PartLayouts, TensorCodec, TensorLayout, UpdateCodec, is_delta

ARRAYS = st.sampled_from(["<f4", "<i8"]).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4))
)
NAMES = st.from_regex(r"[A-Za-z0-9_.]{1,12}", fullmatch=True)
ANY_PARTS = st.dictionaries(st.sampled_from(Part), st.dictionaries(NAMES, ARRAYS, max_size=4))


def classifier(**arrays: object) -> dict[Part, dict[str, Array]]:
    return {Part.CLASSIFIER: cast(dict[str, Array], arrays)}


WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)
COUNT = np.array(7, dtype=np.int64)
PAIR = classifier(weight=WEIGHT, count=COUNT)
PAIR_LAYOUTS = layouts_of(PAIR)


def encoded(parts: dict[Part, dict[str, Array]]) -> bytes:
    return encode_tensors(parts, codecs_for(layouts_of(parts)))


def decoded(data: bytes, layouts: PartLayouts = PAIR_LAYOUTS) -> dict[Part, dict[str, Array]]:
    return payload.decode_tensors(data, layouts, codecs_for(layouts))


@given(ANY_PARTS)
def test_tensors_survive_the_wire_bit_for_bit(parts: dict[Part, dict[str, Array]]) -> None:
    data, layouts = encoded(parts), layouts_of(parts)
    assert len(data) <= payload.max_payload_bytes(layouts, codecs_for(layouts))
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


def test_a_hidden_message_in_the_metadata_is_refused() -> None:
    data = save({"classifier/weight": WEIGHT, "classifier/count": COUNT}, metadata={"note": "x"})
    with pytest.raises(IntegrityError, match="__metadata__"):
        decoded(data)


def test_a_payload_over_its_bound_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(TooLargeError):
        decoded(b"{" * (payload.max_payload_bytes(PAIR_LAYOUTS, codecs_for(PAIR_LAYOUTS)) + 1))


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
    payload.assert_finite(PAIR)
    broken = WEIGHT.copy()
    broken[1, 2] = bad
    with pytest.raises(IntegrityError, match="classifier/weight"):
        payload.assert_finite(classifier(weight=broken, count=COUNT))


EPSILON = 2.0**-23
LEAST = 2.0**-149
Floats = npt.NDArray[np.float32]
LOSSY: tuple[TensorCodec, ...] = ("f16", "i8", "f16-delta", "i8-delta")
SHAPES = npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=9)
ANY_FLOAT = st.floats(width=32, allow_nan=False, allow_infinity=False)
WITHIN_F16 = st.floats(-30000, 30000, width=32)


def arrays(elements: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[Floats, Floats]]:
    """Values and a base of one shape."""
    return SHAPES.flatmap(
        lambda shape: st.tuples(*(npst.arrays(np.float32, shape, elements=elements) for _ in range(2)))
    )


def there_and_back(array: Floats, codec: TensorCodec, base: Floats) -> tuple[Floats, npt.NDArray[np.float64]]:
    """The decoded tensor, and each element's scale (0 without one)."""
    pieces = encode_tensor("classifier/w", array, codec, base)
    stored = payload.stored_tensors(array.shape, codec)
    assert {suffix: (piece.shape, piece.nbytes) for suffix, piece in pieces.items()} == {
        suffix: (one.shape, one.data_bytes) for suffix, one in stored.items()
    }
    scales = pieces.get(payload.SCALE_SUFFIX, np.zeros(len(array), np.float32)).astype(np.float64)
    decoded = decode_tensor("classifier/w", pieces, codec, base)
    assert decoded.dtype == np.float32
    assert decoded.shape == array.shape
    assert decoded.flags.writeable
    return decoded, np.broadcast_to(scales.reshape(-1, *(1,) * (array.ndim - 1)), array.shape)


LEAST_ROW, MOST_ROW = (np.array([[one, -one, 0, one]], np.float32) for one in (LEAST, np.finfo(np.float32).max))


@given(arrays(ANY_FLOAT), st.sampled_from(["i8", "i8-delta"]))
@example((3 * LEAST_ROW, LEAST_ROW), "i8")
@example((MOST_ROW, LEAST_ROW), "i8")
@example((MOST_ROW, -MOST_ROW), "i8-delta")
def test_i8_is_off_by_half_a_scale_at_most(pair: tuple[Floats, Floats], codec: TensorCodec) -> None:
    array, base = pair
    start = base if is_delta(codec) else np.zeros_like(base)
    decoded, scales = there_and_back(array, codec, base)
    steps = np.abs(array.astype(np.float64) - start)
    largest = np.broadcast_to(steps.max(axis=tuple(range(1, array.ndim)), keepdims=True, initial=0.0), array.shape)
    assert (scales >= largest / 127).all()
    assert (scales <= largest / 127 * (1 + EPSILON) + LEAST).all()
    off = np.abs(array.astype(np.float64) - decoded)
    assert (off <= scales / 2 + EPSILON * (np.abs(decoded.astype(np.float64)) + scales) + LEAST).all()


@given(arrays(WITHIN_F16), st.sampled_from(["f16", "f16-delta"]))
def test_f16_is_off_by_half_a_unit_of_its_last_place_at_most(pair: tuple[Floats, Floats], codec: TensorCodec) -> None:
    array, base = pair
    start = base if is_delta(codec) else np.zeros_like(base)
    decoded, _ = there_and_back(array, codec, base)
    off = np.abs(array.astype(np.float64) - decoded)
    steps = np.abs(array.astype(np.float64) - start)
    assert (off <= 2.0**-11 * steps + 2.0**-25 + EPSILON * np.abs(decoded)).all()


@given(arrays(WITHIN_F16), st.sampled_from(LOSSY))
def test_the_same_numbers_always_give_the_same_bytes_and_decoding_again_changes_nothing_by_value(
    pair: tuple[Floats, Floats], codec: TensorCodec
) -> None:
    array, base = pair
    first, again = (encode_tensor("w", np.asarray(one), codec, base) for one in (array, np.asfortranarray(array)))
    assert {suffix: np.asarray(piece, order="C").tobytes() for suffix, piece in first.items()} == {
        suffix: np.asarray(piece, order="C").tobytes() for suffix, piece in again.items()
    }
    if codec == "f16":
        decoded = decode_tensor("w", first, codec, None)
        assert np.array_equal(decode_tensor("w", encode_tensor("w", decoded, codec, None), codec, None), decoded)


def test_numbers_worked_out_by_hand() -> None:
    array = np.array([[127, -64.5, 0.5, 1.5, -127], [0, 0, 0, 0, 0]], np.float32)
    pieces = encode_tensor("w", array, "i8", None)
    # The scale is 1, and halves go to the even neighbour.
    assert pieces[""].tolist() == [[127, -64, 0, 2, -127], [0] * 5]
    assert pieces[payload.SCALE_SUFFIX].tolist() == [1.0, 0.0]
    assert decode_tensor("w", pieces, "i8", None).tolist() == [[127, -64, 0, 2, -127], [0] * 5]
    base = np.full((2, 5), 100, np.float32)
    delta = encode_tensor("w", array + base, "i8-delta", base)
    assert delta[""].tolist() == pieces[""].tolist()
    assert decode_tensor("w", delta, "i8-delta", base).tolist() == [[227, 36, 100, 102, -27], [100] * 5]


@pytest.mark.parametrize("codec", ["f16", "f16-delta"])
def test_what_float16_can_not_hold_is_refused_by_name(codec: TensorCodec) -> None:
    base = np.zeros((1, 9), np.float32)
    for number in (payload.F16_LIMIT, 1e9, -3e38):
        with pytest.raises(CodecError, match=r"generator/w holds .*65504"):
            encode_tensor("generator/w", np.full((1, 9), number, np.float32), codec, base)
    below = np.nextafter(np.float32(payload.F16_LIMIT), np.float32(0))
    assert encode_tensor("w", np.full((1, 9), below), codec, base)[""].max() == 65504


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused_by_name(codec: TensorCodec, bad: float) -> None:
    array = np.zeros((2, 9), np.float32)
    array[1, 3] = bad
    with pytest.raises(CodecError, match="generator/w holds NaN or infinity"):
        encode_tensor("generator/w", array, codec, np.zeros_like(array))


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("int64", (), "i64"),
        ("int64", (64, 64), "i64"),
        ("float32", (), "f32"),
        ("float32", (4096,), "f32"),
        ("float32", (64, 7), "f32"),
        ("float32", (64, 0), "f32"),
        ("float32", (64, 8), "i8-delta"),
        ("float32", (6, 1, 3, 3), "i8-delta"),
    ],
)
def test_integers_and_small_tensors_stay_exact(dtype: Any, shape: tuple[int, ...], expected: str) -> None:
    layout = TensorLayout(name="w", dtype=dtype, shape=shape)
    assert payload.tensor_codec(layout, "i8-delta", has_base=True) == expected
    assert payload.tensor_codec(layout, "i8-delta", has_base=False) == expected.removesuffix("-delta")


# Whole artifacts

RANDOM = np.random.default_rng(5)
PARTS: dict[Part, dict[str, Array]] = {
    Part.CLASSIFIER: {
        "weight": RANDOM.standard_normal((10, 40), dtype=np.float32),
        "bias": RANDOM.standard_normal(10, dtype=np.float32),
    },
    Part.GENERATOR: {
        "weight": RANDOM.standard_normal((40, 12), dtype=np.float32),
        "batches": np.array(1 << 60, np.int64),
    },
}
BASE = Base(
    "a" * 64,
    {
        part: {
            name: array + RANDOM.normal(0, 0.01, array.shape).astype(np.float32) if array.dtype.kind == "f" else array
            for name, array in tensors.items()
        }
        for part, tensors in cast(dict[Part, dict[str, Floats]], PARTS).items()
    },
)
LAYOUTS = layouts_of(PARTS)
HEADER = artifacts.ArtifactHeader(
    kind="update", method="fedcg", federation="f", round=1, attempt=1, client="c", base="a" * 64
)


def packed(codec: UpdateCodec = "i8-delta", base: Base | None = BASE) -> bytes:
    return pack(HEADER, PARTS, codec, base)


def with_pieces(data: bytes, **changes: npt.NDArray[Any]) -> bytes:
    """The artifact with stored tensors replaced, by full key."""
    head, frame = artifacts.split_artifact(data)
    return artifacts.join_artifact(head, save(load(artifacts.decompress_payload(frame, 1 << 20)) | changes))


@pytest.mark.parametrize("codec", get_args(UpdateCodec))
def test_an_artifact_of_any_codec_survives_the_wire_within_the_size_that_was_declared(codec: UpdateCodec) -> None:
    data, codecs = packed(codec), codecs_for(LAYOUTS, codec, frozenset(PARTS))
    assert artifacts.read_header(data).codecs == codecs
    assert artifacts.parts_in(artifacts.read_header(data)) == set(PARTS)
    assert artifacts.decompress_payload(artifacts.split_artifact(data)[1], payload.max_payload_bytes(LAYOUTS, codecs))
    decoded = unpack(data, LAYOUTS, codecs=codecs, base=BASE).parts
    assert np.array_equal(decoded[Part.CLASSIFIER]["bias"], PARTS[Part.CLASSIFIER]["bias"])
    assert int(decoded[Part.GENERATOR]["batches"]) == 1 << 60
    for part in PARTS:
        np.testing.assert_allclose(decoded[part]["weight"], PARTS[part]["weight"], atol=0.02)
    assert packed(codec) == data


def test_coded_bytes_counted_by_hand() -> None:
    exact = 10 * 4 + 8
    for codec, weights in (("f32", 880 * 4), ("f16-delta", 880 * 2), ("i8", 880 + 50 * 4)):
        codecs = codecs_for(LAYOUTS, cast(UpdateCodec, codec), frozenset(PARTS))
        assert payload.data_bytes(LAYOUTS, codecs) == weights + exact


def test_a_part_without_a_base_goes_by_value() -> None:
    half = Base(BASE.id, {Part.CLASSIFIER: BASE.parts[Part.CLASSIFIER]})
    data = packed(base=half)
    assert artifacts.read_header(data).codecs["classifier/weight"] == "i8-delta"
    assert artifacts.read_header(data).codecs["generator/weight"] == "i8"
    unpack(data, LAYOUTS, base=half)
    assert set(artifacts.read_header(packed(base=None)).codecs.values()) == {"i8", "f32", "i64"}


def test_an_unknown_base_is_refused_by_its_digest() -> None:
    with pytest.raises(UnknownBaseError, match="a" * 64):
        unpack(packed(), LAYOUTS)
    with pytest.raises(UnknownBaseError, match="b" * 64):
        unpack(packed(), LAYOUTS, base=Base("b" * 64, BASE.parts))
    with pytest.raises(UnknownBaseError):
        pack(HEADER, PARTS, "i8-delta", Base("b" * 64, BASE.parts))
    unpack(packed("i8", None), LAYOUTS)


def test_a_base_without_the_tensor_is_refused() -> None:
    for parts in ({}, {**BASE.parts, Part.CLASSIFIER: {"weight": np.zeros((40, 10), np.float32)}}):
        with pytest.raises(IntegrityError, match="classifier/weight is coded as the difference"):
            unpack(packed(), LAYOUTS, base=Base(BASE.id, cast(Any, parts)))


def test_an_artifact_coded_otherwise_than_asked_for_is_refused() -> None:
    with pytest.raises(IntegrityError, match="classifier/weight"):
        unpack(packed("f16"), LAYOUTS, codecs=codecs_for(LAYOUTS, "i8"))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0])
def test_a_scale_that_no_encoder_writes_is_refused_by_its_channel(scale: float) -> None:
    scales = np.ones(10, np.float32)
    assert unpack(with_pieces(packed(), **{"classifier/weight:scale": scales}), LAYOUTS, base=BASE)
    scales[7] = scale
    with pytest.raises(IntegrityError, match="classifier/weight: the scale of channel 7"):
        unpack(with_pieces(packed(), **{"classifier/weight:scale": scales}), LAYOUTS, base=BASE)


def test_a_payload_with_other_pieces_than_its_codecs_store_is_refused() -> None:
    for changes in (
        {"classifier/weight:scale": np.ones(9, np.float32)},
        {"classifier/weight:scale": np.ones(10, np.float16)},
        {"classifier/weight": np.ones((10, 40), np.float16)},
        {"classifier/bias:scale": np.ones(10, np.float32)},
        {"classifier/other": np.ones(1, np.float32)},
    ):
        with pytest.raises((IntegrityError, MalformedError)):
            unpack(with_pieces(packed(), **cast(Any, changes)), LAYOUTS, base=BASE)


def test_codecs_that_can_not_hold_their_tensor_are_refused() -> None:
    for key, codec in (("generator/batches", "f32"), ("classifier/bias", "i64")):
        codecs = {**codecs_for(LAYOUTS, "i8"), key: cast(TensorCodec, codec)}
        with pytest.raises(MalformedError, match=key):
            encode_tensors(PARTS, codecs)
        with pytest.raises(IntegrityError, match=key):
            payload.max_payload_bytes(LAYOUTS, codecs)


def test_an_observer_decodes_what_the_receiver_decodes() -> None:
    base = inspect(pack(HEADER.model_copy(update={"kind": "aggregate", "base": None}), BASE.parts))
    for codec in get_args(UpdateCodec):
        received = unpack(packed(codec), LAYOUTS, base=BASE).parts
        seen = decode(inspect(packed(codec)), base)
        assert seen.without_base == frozenset()
        assert set(seen.tensors) == {f"{part.value}/{name}" for part in PARTS for name in PARTS[part]}
        for part, tensors in received.items():
            for name, tensor in tensors.items():
                assert np.array_equal(seen.tensors[f"{part.value}/{name}"], tensor)


def test_an_observer_without_the_base_reads_differences_and_says_so() -> None:
    seen = decode(inspect(packed()))
    assert seen.without_base == {"classifier/weight", "generator/weight"}
    change = cast(Floats, PARTS[Part.CLASSIFIER]["weight"]) - BASE.parts[Part.CLASSIFIER]["weight"]
    np.testing.assert_allclose(seen.tensors["classifier/weight"], change, atol=1e-3)


def test_an_observer_sees_pieces_as_they_came_where_the_header_lies() -> None:
    nan = np.full(10, np.nan, np.float32)
    seen = decode(inspect(with_pieces(packed(), **{"classifier/weight:scale": nan})))
    assert seen.tensors["classifier/weight"].dtype == np.int8
    assert np.isnan(seen.tensors["classifier/weight:scale"]).all()
    liar = artifacts.join_artifact(
        b'{"codecs":{"odd":"i8","x":["f32"],"y":"zip"}}', save({"odd": np.array(3, np.int8)})
    )
    assert decode(inspect(liar)).tensors["odd"] == 3
