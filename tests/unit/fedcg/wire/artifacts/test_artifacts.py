import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from fedcg.wire.artifacts import artifacts
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.inspection import inspect
from fedcg.wire.artifacts.payload import Array, layouts_of
from fedcg.wire.errors import IntegrityError, MalformedError, TooLargeError, WireError
from fedcg.wire.parts import Health, Part, Report

PARTS: dict[Part, dict[str, Array]] = {
    Part.CLASSIFIER: {"weight": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)},
    Part.GENERATOR: {"bias": np.ones(5, np.float32), "num_batches_tracked": np.array(4, np.int64)},
}
LAYOUTS = layouts_of(PARTS)
HEADER = artifacts.ArtifactHeader(
    kind="update",
    method="fedcg",
    federation="casting",
    round=3,
    attempt=1,
    client="site-1",
    base="a" * 64,
    report=Report(examples=120, accuracy=0.5, health=Health.OK),
    versions={"fedcg": "0.1.0"},
    determinism={"threads": "1"},
)
PACKED = artifacts.pack(HEADER, PARTS)


def with_header(**changes: object) -> bytes:
    head, frame = artifacts.split_artifact(PACKED)
    return raw(json.dumps({**json.loads(head), **changes}, sort_keys=True, separators=(",", ":")).encode(), frame)


def raw(head: bytes, frame: bytes) -> bytes:
    return b"FCGA" + len(head).to_bytes(4, "big") + head + frame


def test_an_artifact_survives_the_wire() -> None:
    artifact = artifacts.unpack(PACKED, LAYOUTS)
    assert artifact.header.model_copy(update={"codecs": {}}) == HEADER
    assert artifact.header.report == Report(examples=120, accuracy=0.5, health=Health.OK)
    for part, arrays in PARTS.items():
        for name, array in arrays.items():
            np.testing.assert_array_equal(artifact.parts[part][name], array)


def test_the_same_content_has_the_same_bytes_and_so_the_same_id() -> None:
    shuffled = {part: dict(reversed(arrays.items())) for part, arrays in reversed(PARTS.items())}
    assert artifacts.pack(HEADER, shuffled) == PACKED
    assert artifacts.artifact_id(PACKED) == hashlib.sha256(PACKED).hexdigest()


PLANTED = artifacts.pack(HEADER, {**PARTS, Part.EXTRACTOR: {"weight": np.ones(2, np.float32)}})
HEAD = artifacts.split_artifact(PACKED)[0]


def streamed(payload: bytes) -> bytes:
    """A frame that does not declare its size."""
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(payload) + stream.flush()


@pytest.mark.parametrize(
    ("artifact", "error", "why"),
    [
        (PLANTED, IntegrityError, "extractor/weight"),  # a part that was not agreed on
        (artifacts.join_artifact(HEAD, inspect(PLANTED).payload), WireError, None),  # which the header hides
        (with_header(codecs={"classifier/weight": "f32"}), IntegrityError, "generator/bias"),
        (raw(HEAD, streamed(inspect(PACKED).payload)), MalformedError, "declare"),
        (PACKED + b"hidden", MalformedError, "unused data"),
    ],
)
def test_an_artifact_with_other_content_than_was_agreed_on_is_refused(
    artifact: bytes, error: type[WireError], why: str | None
) -> None:
    with pytest.raises(error, match=why):
        artifacts.unpack(artifact, LAYOUTS)


@pytest.mark.parametrize(
    "changes",
    [
        {"surprise": 1},
        {"format": 2},
        {"kind": "other"},
        {"round": -1},
        {"round": "3"},
        {"client": "Site"},
        {"base": "aa"},
        {"report": {"free_text": "hello"}},
        {"codecs": {"classifier/weight": "pickle"}},
        {"versions": {"fedcg": "ä"}},
        {"versions": {str(n): "x" for n in range(40)}},
        {"label_distribution": [2.0]},
    ],
)
def test_a_header_outside_the_schema_is_refused(changes: dict[str, object]) -> None:
    assert artifacts.read_header(with_header()) == artifacts.read_header(PACKED)
    with pytest.raises(MalformedError):
        artifacts.read_header(with_header(**changes))


def test_a_header_that_is_not_canonical_could_hide_bits_and_is_refused() -> None:
    head, frame = artifacts.split_artifact(PACKED)
    spaced = json.dumps(json.loads(head), sort_keys=True).encode()
    with pytest.raises(MalformedError, match="canonical"):
        artifacts.read_header(raw(spaced, frame))
    lax = head.replace(b'"examples":120', b'"examples":"120"')
    with pytest.raises(MalformedError):
        artifacts.read_header(raw(lax, frame))


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    with pytest.raises(TooLargeError):
        artifacts.split_artifact(b"FCGA" + (artifacts.MAX_HEADER_BYTES + 1).to_bytes(4, "big") + b"{}")
    with pytest.raises(MalformedError):
        artifacts.split_artifact(b"FCGA" + (1000).to_bytes(4, "big") + b"{}")
    with pytest.raises(TooLargeError):
        artifacts.unpack(PACKED, LAYOUTS, max_bytes=len(PACKED) - 1)


def test_a_decompression_bomb_is_refused_by_what_it_declares() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(200_000_000))
    assert len(bomb) < 100_000
    with pytest.raises(TooLargeError, match="200000000"):
        artifacts.unpack(raw(artifacts.split_artifact(PACKED)[0], bomb), LAYOUTS)
    with pytest.raises(TooLargeError):
        inspect(raw(b"{}", bomb), max_bytes=1_000_000)


@given(st.integers(min_value=0), st.integers(min_value=1, max_value=255))
def test_a_changed_byte_gives_an_error_of_the_wire_or_another_id(position: int, change: int) -> None:
    data = bytearray(PACKED)
    data[position % len(data)] ^= change
    assert artifacts.artifact_id(bytes(data)) != artifacts.artifact_id(PACKED)
    try:
        artifacts.unpack(bytes(data), LAYOUTS)
    except WireError:
        return


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_an_error_of_the_wire(data: bytes) -> None:
    for candidate in (data, b"FCGA" + data, b"FCGA\0\0\0\2{}" + data):
        with pytest.raises(WireError):
            artifacts.unpack(candidate, LAYOUTS)
        with pytest.raises(WireError):
            inspect(candidate)


@pytest.mark.parametrize("dtype", ["<f2", "<f8", "<f4", "i1", "<i8"])
def test_an_observer_sees_every_tensor_whatever_its_type_and_name(dtype: str) -> None:
    planted = np.array([[1, -2], [3, 4]], dtype=dtype)
    payload = save({"extractor/conv.weight": planted, "odd": planted})
    seen = inspect(artifacts.join_artifact(b'{"report":{"secret":"x","loss":null},"more":1}', payload))
    assert seen.part_names == {"extractor", "odd"}
    np.testing.assert_array_equal(seen.tensors["extractor/conv.weight"], planted)
    assert seen.report_fields == {"secret"}
    assert seen.header["more"] == 1
    assert planted.tobytes() in seen.payload


def test_an_observer_reads_bfloat16() -> None:
    head = json.dumps({"extractor/w": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    payload = len(head).to_bytes(8, "little") + head + bytes.fromhex("803f00c0")
    np.testing.assert_array_equal(inspect(artifacts.join_artifact(b"{}", payload)).tensors["extractor/w"], [1.0, -2.0])


def test_a_store_gives_back_what_was_put_and_keeps_it_once(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path / "artifacts")
    name = store.put(PACKED)
    assert name == artifacts.artifact_id(PACKED) == store.put(PACKED)
    assert ArtifactStore(tmp_path / "artifacts").get(name) == PACKED
    assert store.has(name)
    assert list(store.ids()) == [name] == [entry.name for entry in (tmp_path / "artifacts").iterdir()]


def test_a_store_notices_a_damaged_file_and_putting_it_again_repairs_it(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    name = store.put(PACKED)
    store.path(name).write_bytes(PACKED[:-1] + b"\0")
    with pytest.raises(IntegrityError, match=name):
        store.get(name)
    assert store.put(PACKED) == name
    assert store.get(name) == PACKED


@pytest.mark.parametrize("name", ["", "..", "../" * 20 + "etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_name_that_is_no_id_never_becomes_a_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(MalformedError):
        ArtifactStore(tmp_path).path(name)
