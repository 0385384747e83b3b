"""The observer sees every part, field and byte that crosses; the leakage check accuses what leaks, in every coding, and nothing else."""

import json
import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from typer.testing import CliRunner

from audit.cli import app
from audit.errors import CaptureError, DecodeError
from audit.recording.capture import Capture
from audit.recording.copied_rows import copied_rows, least_correlation
from audit.recording.leakage import UNSEEN, PrivateTensor, WireTensor, check_recording, compare, find_bytes
from audit.recording.observer import Observer
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, artifact_id, pack
from fedcg.wire.messages.envelopes import SigningKey, make_link, seal
from fedcg.wire.messages.schemas import Finished, KeyChain, Manifest
from fedcg.wire.messages.topics import Topics
from fedcg.wire.parts import Part, Report, TensorLayout, UpdateCodec
from fedcg.wire.sealed_numbers import to_numbers
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.learning.export_models import make_spec
from tests.support.stack import wait_for
from tests.support.wire.artifact_chunks import frames_for, make_ref

TOPICS = Topics("digits")
KEY = SigningKey.generate()
EXTRACTOR = np.random.default_rng(0).normal(0, 1, (6, 1, 5, 5)).astype(np.float32)


AGGREGATE = ArtifactHeader(
    kind="aggregate", method="fedcg", federation="digits", round=2, attempt=1, client="coordinator"
)
FROM_COORDINATOR: dict[str, Any] = {"federation": "digits", "sender": "coordinator", "recipient": "*"}


def update(part: Part = Part.CLASSIFIER, value: np.ndarray | None = None, seed: int = 1) -> bytes:
    sent = {"kind": "update", "client": "client-1", "report": Report(examples=10, accuracy=0.5)}
    header = AGGREGATE.model_copy(update=sent)
    tensor = np.random.default_rng(seed).normal(0, 1, (6, 1, 5, 5)).astype(np.float32) if value is None else value
    return pack(header, {part: {"weight": tensor}})


def manifest(data: bytes) -> bytes:
    names = {"federation": "digits", "sender": "client-1", "recipient": "coordinator"}
    return seal(Manifest(**names, round=2, attempt=1, artifact=make_ref(data, 256)), KEY)


def frames(data: bytes) -> list[bytes]:
    reference = make_ref(data, 256)
    return list(frames_for(data, reference, ((0, reference.chunks),)))


def feed(capture: Capture, some: Iterable[bytes]) -> list[dict[str, bytes]]:
    return [dict(capture.feed(TOPICS.up_chunk("client-1"), frame)) for frame in some]


def test_an_update_is_decoded_and_its_bytes_are_counted_to_its_device_and_round() -> None:
    capture, data = Capture("digits"), update()
    capture.feed(TOPICS.up_control("client-1"), manifest(data))
    completed = feed(capture, frames(data))
    assert completed == [{}] * (len(completed) - 1) + [{artifact_id(data): data}]
    (seen,) = capture.artifacts.values()
    assert (seen.kind, seen.sender, seen.round, seen.parts) == ("update", "client-1", 2, ("classifier",))
    assert (seen.report, seen.tensors) == (("accuracy", "examples"), {"classifier/weight": (6, 1, 5, 5)})
    assert capture.bytes_per_round() == {"client-1": {"up": {"2": len(manifest(data)) + sum(map(len, frames(data)))}}}


def test_a_planted_extractor_is_seen_by_name() -> None:
    capture, data = Capture("digits"), update(Part.EXTRACTOR)
    feed(capture, frames(data))
    capture.feed(TOPICS.up_control("client-1"), manifest(data))
    assert capture.record()["parts_on_wire"] == ["extractor"]


def test_chunks_in_any_order_repeated_and_before_the_manifest_still_make_the_artifact() -> None:
    capture, data = Capture("digits"), update()
    mixed = frames(data)[::-1]
    feed(capture, mixed[:2] + mixed)
    assert not capture.artifacts
    assert capture.feed(TOPICS.up_control("client-1"), manifest(data))


def test_a_missing_chunk_is_reported_and_keeps_the_recording_from_being_finished() -> None:
    capture, data = Capture("digits"), update()
    capture.feed(TOPICS.up_control("client-1"), manifest(data))
    feed(capture, frames(data)[:-1])
    assert len(capture.record()["incomplete"]) == 1  # type: ignore[arg-type]
    assert not capture.is_finished


def test_an_artifact_that_is_too_large_to_hold_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit.recording.capture.MAX_HELD_BYTES", 300)
    capture, data = Capture("digits"), update()
    feed(capture, frames(data))
    assert capture.record()["incomplete"] == [artifact_id(data)]


def test_damaged_and_foreign_frames_are_counted_and_harmless() -> None:
    capture = Capture("digits")
    feed(capture, [b"not a chunk"])
    capture.feed(TOPICS.offer, b"not an envelope")
    capture.feed(TOPICS.offer, b"")
    capture.feed(TOPICS.offer, b"FCG1" + bytes(64) + b"[" * 100_000)
    capture.feed("elsewhere/topic", b"x")
    record = capture.record()
    assert (record["damaged_frames"], record["foreign_frames"]) == (3, 1)


def test_message_fields_are_listed_even_when_the_protocol_does_not_know_them() -> None:
    capture = Capture("digits")
    payload = json.dumps({"kind": "gossip", "sender": "client-1", "round": 1, "faces": ["a"]}).encode()
    capture.feed(TOPICS.up_control("client-1"), b"FCG1" + bytes(64) + payload)
    assert capture.record()["messages"] == {"gossip": {"count": 1, "fields": ["faces"], "senders": ["client-1"]}}


def test_the_coordinators_keys_are_written_down_and_one_that_is_told_twice_differently_is_noticed() -> None:
    capture, keys = Capture("digits"), [SigningKey.generate() for _ in range(3)]

    def tell(old: SigningKey, new: SigningKey) -> None:
        links = (make_link("digits", 1, 1, old, new.public),)
        capture.feed(TOPICS.keys, seal(KeyChain(**FROM_COORDINATOR, links=links), new))

    tell(keys[0], keys[1])
    tell(keys[0], keys[1])
    assert (capture.record()["coordinator_keys"], capture.record()["key_problems"]) == ({"1": keys[1].public.hex}, [])
    tell(keys[0], keys[2])
    assert capture.record()["key_problems"] == ["key 1 was announced twice, with different content"]


@dataclass
class Recording:
    broker: MemoryBroker
    device: MemoryTransport
    coordinator: MemoryTransport


def rules(identity: str, action: str, topic: str) -> bool:
    return (TOPICS.may_publish if action == "publish" else TOPICS.may_read)(identity, topic)


@pytest.fixture
def wire() -> Recording:
    broker = MemoryBroker(rules=rules)
    device, coordinator = MemoryTransport(broker, "client-1"), MemoryTransport(broker, "coordinator")
    for transport in (device, coordinator):
        transport.start(lambda _: None, lambda _: None)
    return Recording(broker, device, coordinator)


def send_update(wire: Recording, data: bytes) -> None:
    wire.device.publish(TOPICS.up_control("client-1"), manifest(data))
    for frame in frames(data):
        wire.device.publish(TOPICS.up_chunk("client-1"), frame)


def record(wire: Recording, out: Path, *sent: bytes) -> dict[str, Any]:
    """What an observer writes down of these artifacts and the end of the federation."""
    observer = Observer(MemoryTransport(wire.broker, "observer"), "digits", out, keep_frames=True)
    ready = threading.Event()
    observer.start()
    thread = threading.Thread(
        target=observer.run, args=(threading.Event(),), kwargs={"until_finished": True, "on_ready": ready.set}
    )
    thread.start()
    assert ready.wait(10)
    for data in sent:
        send_update(wire, data)
    spec = make_spec().canonical()
    final = pack(AGGREGATE, {Part.CLASSIFIER: {"weight": np.ones((2, 2), np.float32)}})
    for frame in frames(spec) + frames(final):
        wire.coordinator.publish(TOPICS.aggregate, frame)
    message = Finished(**FROM_COORDINATOR, spec=make_ref(spec, 256), aggregate=make_ref(final, 256))
    wire.coordinator.publish(TOPICS.offer, seal(message, KEY), retain=True)
    thread.join(20)
    assert not thread.is_alive()
    result: dict[str, Any] = json.loads((out / "wire.json").read_text())
    return result


def test_a_whole_recording_ends_with_the_federation_and_is_complete(wire: Recording, tmp_path: Path) -> None:
    data = update()
    written = record(wire, tmp_path, data)
    assert (written["finished"], written["parts_on_wire"]) == (True, ["classifier"])
    assert written["fields_on_wire"] == ["accuracy", "examples"]
    assert sorted(entry["kind"] for entry in written["artifacts"]) == ["aggregate", "spec", "update"]
    assert data in {path.read_bytes() for path in (tmp_path / "artifacts").iterdir()}
    kept, topic = (tmp_path / "frames.bin").read_bytes(), TOPICS.up_chunk("client-1").encode()
    for frame in frames(data):
        assert struct.pack(">II", len(topic), len(frame)) + topic + frame in kept


def test_a_recording_is_continued_where_an_earlier_one_stopped(wire: Recording, tmp_path: Path) -> None:
    first = Observer(MemoryTransport(wire.broker, "observer"), "digits", tmp_path)
    first.start()
    send_update(wire, update(seed=1))
    stop = threading.Event()
    how = {"until_finished": False, "on_ready": lambda: None}
    thread = threading.Thread(target=first.run, args=(stop,), kwargs=how)
    thread.start()
    wait_for(lambda: len(list((tmp_path / "artifacts").iterdir())) == 1, "the first update is recorded")
    stop.set()
    thread.join(10)
    before = json.loads((tmp_path / "wire.json").read_text())["bytes"]["client-1"]["up"]["2"]
    written = record(wire, tmp_path, update(seed=2))
    assert len([entry for entry in written["artifacts"] if entry["kind"] == "update"]) == 2
    assert written["bytes"]["client-1"]["up"]["2"] > before


@pytest.mark.parametrize("leaks", [False, True], ids=["clean", "planted"])
def test_a_recording_is_checked_against_private_weights(wire: Recording, tmp_path: Path, leaks: bool) -> None:
    weights = {"personal/extractor/weight": EXTRACTOR, "personal/classifier/weight": EXTRACTOR}
    save_file(weights, tmp_path / "state.safetensors")
    record(wire, tmp_path / "seen", update(Part.GENERATOR, EXTRACTOR if leaks else None))
    check = check_recording(tmp_path / "seen", [tmp_path / "state.safetensors"])
    assert check.private_tensors == 1
    assert {match.how for match in check.matches} == ({"value", "bytes"} if leaks else set())
    assert UNSEEN in check.summary()


@pytest.mark.parametrize(("part", "leaks"), [(Part.GENERATOR, True), (Part.CLASSIFIER, False)])
def test_the_shadow_model_is_private_and_may_resemble_the_sent_part_of_its_name(
    wire: Recording, tmp_path: Path, part: Part, leaks: bool
) -> None:
    save_file({"shadow/classifier/weight": EXTRACTOR}, tmp_path / "state.safetensors")
    record(wire, tmp_path / "seen", update(part, 2 * EXTRACTOR))
    assert check_recording(tmp_path / "seen", [tmp_path / "state.safetensors"]).is_clean != leaks


def test_the_change_of_a_private_tensor_between_two_files_is_searched_for(wire: Recording, tmp_path: Path) -> None:
    after = EXTRACTOR + np.random.default_rng(8).normal(0, 1e-3, EXTRACTOR.shape).astype(np.float32)
    for name, value in (("4", EXTRACTOR), ("5", after)):
        save_file({"extractor/weight": value}, tmp_path / name)
    record(wire, tmp_path / "seen", update(Part.GENERATOR, after - EXTRACTOR))
    check = check_recording(tmp_path / "seen", [tmp_path / "4", tmp_path / "5"])
    assert {match.owner for match in check.matches} == {f"{tmp_path / '5'} minus {tmp_path / '4'}"}
    save_file(
        {"after/extractor/weight": after, "before/extractor/weight": EXTRACTOR, "x/extractor/b": np.ones(3)},
        tmp_path / "5",
    )
    check = check_recording(tmp_path / "seen", [tmp_path / "5"])
    assert {match.private for match in check.matches} == {"before/extractor/weight minus after/extractor/weight"}
    assert check.too_short == 1
    save_file({"after/extractor/weight": after}, tmp_path / "5")
    assert check_recording(tmp_path / "seen", [tmp_path / "5"]).is_clean


@pytest.mark.parametrize("is_hidden", [True, False])
def test_sealed_numbers_are_fair_coins_or_are_told(wire: Recording, tmp_path: Path, is_hidden: bool) -> None:
    save_file({"personal/extractor/weight": EXTRACTOR}, tmp_path / "state.safetensors")
    layouts = (TensorLayout(name="weight", dtype="float32", shape=EXTRACTOR.shape),)
    numbers = to_numbers({"weight": EXTRACTOR}, layouts, 64.0, 0.25)
    mask = np.random.default_rng(3).integers(0, 1 << 32, numbers.shape, np.uint32)
    written = record(wire, tmp_path / "seen", update(Part.SEALED, numbers + mask * is_hidden))
    assert written["sealed"]["is_fair"] == is_hidden
    found = CliRunner().invoke(
        app, ["compare", "--observed", str(tmp_path / "seen"), "--private", str(tmp_path / "state.safetensors")]
    )
    assert found.exit_code == (0 if is_hidden else 8)
    assert ("reveal nothing" if is_hidden else "ARE NOT HIDDEN") in found.output


def test_every_artifact_of_a_recording_is_compared_or_named(wire: Recording, tmp_path: Path) -> None:
    states, folder = tmp_path / "store" / "generations" / "4", tmp_path / "seen" / "artifacts"
    states.mkdir(parents=True)
    save_file({"extractor/weight": EXTRACTOR}, states / "state.safetensors")
    record(wire, tmp_path / "seen", update())

    def add(data: bytes) -> Path:
        (folder / sha256(data).hexdigest()).write_bytes(data)
        return folder / sha256(data).hexdigest()

    assert check_recording(tmp_path / "seen", [tmp_path / "store"]).is_clean
    unlisted = add(update(Part.GENERATOR, EXTRACTOR))
    assert check_recording(tmp_path / "seen", [tmp_path / "store"]).matches
    unlisted.unlink()
    cut = add(update()[:-1])
    check = check_recording(tmp_path / "seen", [tmp_path / "store"])
    assert (check.is_clean, check.undecoded) == (False, (cut.name,))
    assert f"artifact {cut.name[:12]} can't be decoded: nothing is known of it" in check.summary()
    cut.unlink()
    cut = add(b"{" + EXTRACTOR.tobytes())  # no spec, although specs begin with a brace
    assert check_recording(tmp_path / "seen", [tmp_path / "store"]).undecoded == (cut.name,)
    cut.write_bytes(b"rot")
    with pytest.raises(DecodeError, match="is damaged: its sha256 is not its name"):
        check_recording(tmp_path / "seen", [tmp_path / "store"])
    cut.unlink()
    written = json.loads((tmp_path / "seen" / "wire.json").read_text())
    (tmp_path / "seen" / "wire.json").write_text(json.dumps(written | {"incomplete": ["a"], "lost_frames": 3}))
    check = check_recording(tmp_path / "seen", [tmp_path / "store"])
    assert (check.is_clean, check.gaps[0]) == (False, "1 incomplete transfers")
    assert "gaps, of which nothing is known: 3 frames dropped" in check.summary()
    next(folder.iterdir()).unlink()
    with pytest.raises(CaptureError, match="lacks artifact"):
        check_recording(tmp_path / "seen", [tmp_path / "store"])


def test_a_classifier_that_the_method_keeps_private_is_searched_for(wire: Recording, tmp_path: Path) -> None:
    spec = make_spec().model_copy(update={"method": "ppidsg"})
    save_file({"personal/classifier/weight": EXTRACTOR}, tmp_path / "state.safetensors")
    record(wire, tmp_path / "seen", update(Part.GENERATOR, EXTRACTOR), spec.canonical())
    assert check_recording(tmp_path / "seen", [tmp_path / "state.safetensors"]).matches


def test_a_check_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match="not an observer's folder"):
        check_recording(tmp_path, [])
    (tmp_path / "wire.json").write_text(json.dumps({"artifacts": []}))
    save_file({"classifier/weight": EXTRACTOR}, tmp_path / "state.safetensors")
    with pytest.raises(CaptureError, match="holds no artifact: start `fedcg audit observe` before"):
        check_recording(tmp_path, [tmp_path / "state.safetensors"])
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / sha256(b"x").hexdigest()).write_bytes(b"x")
    with pytest.raises(DecodeError, match="no tensor of a private part"):
        check_recording(tmp_path, [tmp_path / "state.safetensors"])


@pytest.mark.parametrize(
    ("has_base", "codec"),
    [(True, "i8-delta"), (False, "i8-delta"), (True, "f32")],
    ids=["base seen", "base not seen", "added to the base"],
)
def test_a_coded_update_is_decoded_and_a_missing_base_is_told(
    wire: Recording, tmp_path: Path, has_base: bool, codec: UpdateCodec
) -> None:
    save_file({"personal/extractor/weight": EXTRACTOR}, tmp_path / "state.safetensors")
    start = np.random.default_rng(4).normal(0, 5, EXTRACTOR.shape).astype(np.float32)
    header = AGGREGATE.model_copy(update={"round": 1})
    base = pack(header, {Part.GENERATOR: {"weight": start}})
    known = Base(artifact_id(base), {Part.GENERATOR: {"weight": start}})
    told = header.model_copy(update={"kind": "update", "client": "client-1", "base": known.id, "round": 2})
    data = pack(told, {Part.GENERATOR: {"weight": EXTRACTOR + (codec == "f32") * start}}, codec, known)
    written = record(wire, tmp_path / "seen", *([base] if has_base else []), data)
    assert next(entry for entry in written["artifacts"] if entry["kind"] == "update")["base"] == known.id
    assert written["bases_not_seen"] == ([] if has_base else [known.id])
    check = check_recording(tmp_path / "seen", [tmp_path / "state.safetensors"])
    assert check.without_base == ({} if has_base else {known.id: 1})
    assert (f"are differences from aggregate {known.id}, which was not recorded" in check.summary()) != has_base
    place = {
        "i8-delta": ("generator/weight (decoded)", None),
        "f32": ("generator/weight", "minus base generator/weight"),
    }
    assert {(match.tensor, match.base) for match in check.matches} == ({place[codec]} if has_base else set())


Array = NDArray[Any]
INITIAL = np.random.default_rng(1).normal(0, 0.1, (16, 6, 5, 5)).astype(np.float32)
# Channels learn at different speeds, so that one scale per channel matters.
_SPEED = np.geomspace(0.002, 0.15, 16).reshape(16, 1, 1, 1)
TRAINED = (INITIAL + _SPEED * np.random.default_rng(2).normal(0, 1, INITIAL.shape)).astype(np.float32)
PRIVATE = (PrivateTensor("client-1 round 1", "extractor/conv2.weight", TRAINED),)


def per_channel_int8(values: Array) -> Array:
    scales = np.abs(values).reshape(len(values), -1).max(axis=1) / 127
    coded: Array = np.rint(values / scales.reshape(-1, 1, 1, 1)).astype(np.int8)
    return coded


def seen(value: Array, **bases: Array) -> tuple[WireTensor]:
    return (WireTensor("ab" * 32, "generator/hidden", value, bases),)


@pytest.mark.parametrize(
    "value",
    [
        TRAINED,
        TRAINED.astype(np.float16),
        TRAINED.reshape(-1),
        TRAINED.reshape(96, 25) * -3.0 + 7.0,
        per_channel_int8(TRAINED),
    ],
    ids=["f32", "f16", "flattened", "scaled and sign-flipped", "i8 with a scale per channel"],
)
def test_a_planted_extractor_is_found_as_value(value: Array) -> None:
    (match,) = compare(seen(value), PRIVATE)
    assert (match.how, match.private, match.owner) == ("value", "extractor/conv2.weight", "client-1 round 1")
    assert match.correlation >= 0.99


@pytest.mark.parametrize("value", [TRAINED - INITIAL, (TRAINED - INITIAL).astype(np.float16)], ids=["f32", "f16"])
def test_a_planted_delta_is_found_only_with_its_base(value: Array) -> None:
    assert compare(seen(value), PRIVATE) == []
    (match,) = compare(seen(value, initial=INITIAL), PRIVATE)
    assert (match.how, match.base) == ("delta", "initial")


HOST = np.random.default_rng(7).normal(0, 0.05, (120, 90)).astype(np.float32)
ROW = TRAINED.reshape(16, 150)[3]
IMAGE = np.hypot(*np.mgrid[-1:1:28j, -1:1:28j]) * np.random.default_rng(8).uniform(0.7, 1.3, (28, 28))

GREY = (IMAGE[::2, ::2] * 8).round()


def planted(row: Array, *, at: int = 1000, columns: bool = False) -> Array:
    lines = (HOST.T if columns else HOST).copy()
    flat = lines.reshape(-1)
    flat[at : at + row.size] = row.ravel()
    return lines.T if columns else lines


def noisy(share: float) -> Array:
    found: Array = ROW + share * ROW.std() * np.random.default_rng(9).normal(size=ROW.size)
    return found


COPIES = {
    "scaled": (planted(0.01 * ROW + 3), TRAINED),
    "turned": (planted(-40 * ROW[::-1], at=HOST.size - 150), TRAINED),
    "a piece": (planted(ROW[30:130], at=0), TRAINED),
    "a column": (planted(ROW, columns=True), TRAINED),
    "i8": (per_channel_int8(planted(ROW).reshape(120, 90, 1, 1)), TRAINED),
    "noise": (planted(noisy(0.1)), TRAINED),
    "permuted": (planted(TRAINED.reshape(16, 150)[[5, 2, 9]]), TRAINED),
    "a private column": (planted(HOST[:40, 5] * 3 + 1), HOST[:40, :20]),
    "25 numbers": (planted(EXTRACTOR[4] * 2), EXTRACTOR),
    "image": (planted(IMAGE / 9, columns=True), IMAGE.ravel()),
    "image of 17 levels": (planted(GREY / 9), GREY),
}


@pytest.mark.parametrize(("value", "private"), COPIES.values(), ids=COPIES)
def test_a_copied_row_is_found_inside_another_tensor(value: Array, private: Array) -> None:
    other = np.random.default_rng(11).normal(size=HOST.shape)
    assert copied_rows([other], [private]) == {}
    assert list(copied_rows([other, value], [ROW[:20], private])) == [(1, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_rows_of_independent_tensors_are_not_accused(seed: int) -> None:
    drawn = np.random.default_rng(seed)
    smooth = drawn.normal(size=(40, 900)).cumsum(axis=1)
    others = [drawn.normal(size=(200, 150)), smooth[:20], np.ones((90, 90)), np.full(90, np.nan), np.ones((0, 30))]
    assert copied_rows(others, [drawn.normal(size=(64, 25)), TRAINED, np.eye(64), np.ones(70)]) == {}


def test_the_chance_of_a_correlation_is_the_share_of_independent_rows_that_exceed_it() -> None:
    left, right = np.random.default_rng(10).normal(size=(2, 40_000, 24))
    found = [abs(np.corrcoef(a, b)[0, 1]) for a, b in zip(left, right, strict=True)]
    assert np.mean(np.array(found) > least_correlation(24, 0.01)) == pytest.approx(0.01, abs=0.002)


def test_unrelated_tensors_of_the_same_size_are_not_accused() -> None:
    generator = np.random.default_rng(4)
    others = tuple(
        WireTensor("cd" * 32, f"generator/{n}", generator.normal(0, 0.1, TRAINED.size), {"initial": INITIAL})
        for n in range(50)
    )
    assert compare(others, PRIVATE) == []


def test_a_value_near_its_own_base_is_not_accused_of_a_small_private_tensor() -> None:
    base = np.random.default_rng(5).normal(0, 1, TRAINED.shape)
    tiny = (PrivateTensor("client-1", "discriminator/weight", 0.001 * TRAINED),)
    assert compare(seen(base * 1.01, aggregate=base), tiny) == []


def test_a_zero_update_of_a_known_start_is_not_accused() -> None:
    near = (PrivateTensor("client-1", "extractor/conv2.weight", INITIAL * 1.0001),)
    assert compare(seen(np.zeros_like(INITIAL), initial=INITIAL), near) == []


def test_constants_and_nans_do_no_harm() -> None:
    assert compare(seen(np.full(TRAINED.shape, np.nan)), PRIVATE) == []


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_raw_bytes_of_a_private_tensor_are_found_inside_a_payload(kind: type) -> None:
    noise = np.random.default_rng(6).bytes(4000)
    (match,) = find_bytes({"frame": noise + TRAINED.astype(kind).tobytes() + noise, "clean": noise * 3}, PRIVATE)
    assert (match.artifact, match.how) == ("frame", "bytes")


def test_a_piece_of_a_private_tensor_is_found_too() -> None:
    assert find_bytes({"frame": b"header" + TRAINED.ravel()[: TRAINED.size // 3].tobytes()}, PRIVATE)


def test_constant_tensors_give_no_needle() -> None:
    ones = (PrivateTensor("client-1", "discriminator/norm.weight", np.ones(400, dtype=np.float32)),)
    assert find_bytes({"frame": np.ones(1000, dtype=np.float32).tobytes()}, ones) == []


def test_a_small_tensor_beside_a_huge_one_is_still_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("audit.recording.copied_rows._MOST_RUNS", 10)
    drawn = np.random.default_rng(3)
    small = drawn.normal(size=(1, 64))
    assert copied_rows([planted(small[0] * 2)], [drawn.normal(size=(40, 128)), small]).keys() == {(0, 1)}
