"""Frames, artifacts and private stores as each version wrote them (tests/golden) are read by this version, and written the same."""

import json
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from edge_client.store.private_store import STORE_FORMAT, PrivateStore
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifacts import Base, artifact_id, unpack
from fedcg.wire.messages.envelopes import open_envelope, read_envelope, seal
from fedcg.wire.messages.schemas import PROTOCOL_VERSION, SPOKEN, AnyMessage, RoundAttempt
from fedcg.wire.parts import Part
from fedcg.wire.transfer.chunks import parse_chunk
from tests.support.edge.world import toy_generation, toy_parts, toy_spec
from tests.support.wire.golden_files import (
    COORDINATOR_KEY,
    DEVICE,
    FEDERATION,
    GOLDEN,
    NEW_KEY,
    SHARED,
    artifacts,
    fill_store,
    key_of,
    messages,
)


def frames(version: int) -> dict[str, bytes]:
    stored = json.loads((GOLDEN / "frames" / f"protocol-{version}.json").read_text())
    return {kind: bytes.fromhex(text) for kind, text in stored.items()}


@pytest.mark.parametrize("version", SPOKEN)
def test_every_kind_of_message_has_a_golden_frame(version: int) -> None:
    kinds = {model.model_fields["kind"].default for model in get_args(AnyMessage)}
    assert set(frames(version)) >= kinds | {"chunk"}


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.kind)
def test_a_golden_frame_opens_to_its_message_and_is_sealed_to_the_same_bytes(message: AnyMessage) -> None:
    frame = frames(PROTOCOL_VERSION)[message.kind]
    key = key_of(message)
    assert open_envelope(frame, lambda _sender: key.public) == message
    assert seal(message, key) == frame


@pytest.mark.parametrize("version", SPOKEN)
def test_frames_of_every_version_that_is_served_are_read(version: int) -> None:
    for kind, frame in frames(version).items():
        if kind == "chunk":
            assert parse_chunk(frame).data == (b"golden" * 100)[:256]
        else:
            assert read_envelope(frame).message.kind == kind


@pytest.mark.parametrize("kind", ["hello", "welcome", "refusal"])
def test_the_messages_that_agree_on_a_version_keep_their_form_for_ever(kind: str) -> None:
    assert read_envelope(frames(1)[kind]).message.kind == kind


def golden_artifact(name: str) -> bytes:
    suffix = "json" if name == "spec" else "bin"
    return (GOLDEN / "artifacts" / f"{name}-codecs.{suffix}").read_bytes()


def test_golden_artifacts_of_the_default_codecs_are_read() -> None:
    spec = FederationSpec.parse(golden_artifact("spec"))
    assert (spec.codec, spec.aggregate_codec) == ("i8-delta", "f16")
    layouts = {part: spec.layouts[part] for part in spec.upload}
    aggregate = golden_artifact("aggregate")
    decoded = unpack(aggregate, layouts).parts
    for part, tensors in toy_parts(1, SHARED).items():
        for name, values in tensors.items():
            assert np.allclose(decoded[part][name], values, rtol=2.0**-11, atol=0)
    update = unpack(golden_artifact("update"), layouts, base=Base(artifact_id(aggregate), decoded))
    assert update.header.report is not None
    assert update.header.report.examples == 3
    for part, tensors in toy_parts(2, SHARED).items():
        for name, values in tensors.items():
            apart = np.abs(np.asarray(values, float) - decoded[part][name]).max()
            assert np.allclose(update.parts[part][name], values, rtol=0, atol=apart / 127 + 1e-6), (part, name)


def test_artifacts_are_still_written_as_they_were() -> None:
    assert {name: golden_artifact(name) for name in artifacts()} == artifacts()


def golden_store(folder: Path) -> PrivateStore:
    root = folder / "store"
    shutil.copytree(GOLDEN / "stores" / f"format-{STORE_FORMAT}", root)
    return PrivateStore.open(root, FEDERATION, DEVICE)


def test_a_private_store_opens_with_all_that_it_holds_and_goes_on(tmp_path: Path) -> None:
    store = golden_store(tmp_path)
    spec, new = toy_spec(), toy_generation(toy_spec(), RoundAttempt(2, 1), artifacts()["update"], seed=2)
    state = store.generations.load()
    assert state is not None
    assert (state.generation.number, state.generation.round_attempt) == (2, RoundAttempt(2, 1))
    assert state.slots["personal"][Part.EXTRACTOR]["weight"].tolist() == (
        np.asarray(new.slots["personal"][Part.EXTRACTOR]["weight"]).tolist()
    )
    assert store.generations.update_bytes(state.generation) == artifacts()["update"]
    assert store.outbox(state.generation) is not None
    assert store.generations.snapshot(state.generation) == new.snapshot
    assert store.device_secret() == b"d" * 32
    assert store.cohort_secret() == b"c" * 32
    assert store.spec_digests() == {spec.digest}
    assert store.artifacts.get(artifact_id(artifacts()["aggregate"])) == artifacts()["aggregate"]
    assert store.seen() == (3, 2, 1)
    assert [record.artifact for record in store.deliveries()] == ["a" * 64]
    pinned = store.pinned_key(COORDINATOR_KEY.public)
    assert (pinned.key, pinned.serial) == (NEW_KEY.public, 1)
    assert store.finalised()["aggregate"] == "b" * 64
    store.generations.commit(toy_generation(spec, RoundAttempt(3, 1)))
    assert store.generations.current()[0].round_attempt == RoundAttempt(3, 1)  # type: ignore[union-attr]


def test_a_private_store_is_still_written_as_it_was(tmp_path: Path) -> None:
    fill_store(tmp_path / "store")
    golden = GOLDEN / "stores" / f"format-{STORE_FORMAT}"
    written, known = (
        {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "store", golden)
    )
    assert written == known
