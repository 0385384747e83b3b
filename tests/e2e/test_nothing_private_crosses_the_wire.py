"""A whole federation over a real broker, recorded by an independent observer: no private tensor is in what crossed it."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from audit.recording.leakage import Check, check_recording
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.schemas import COORDINATOR, Manifest
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles
from tests.support.plant import as_artifact
from tests.support.stack import Stack, wait_for
from tests.support.wire.artifact_chunks import frames_for, make_ref

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.timeout(280)]
THIEF = "site-1"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A finished two-round federation whose observer still listens."""
    params = {"epochs": 2, "server_iterations": 50, "ramp_rounds": 2}
    stack = Stack(root=tmp_path_factory.mktemp("recorded"), params=params)
    with stack.up(agents=True, observer=()):
        stack.wait_finished()
        wait_for(lambda: _recorded(stack) >= 1 + 3 + 2 * 3, "spec, three aggregates and six updates are recorded", 20)
        yield stack


def _recorded(stack: Stack) -> int:
    path = stack.root / "wire" / "wire.json"
    return len(json.loads(path.read_text())["artifacts"]) if path.exists() else 0


def _private_files(stack: Stack) -> list[Path]:
    return [
        path for device in stack.devices for path in sorted(stack.store(device).glob("generations/*/state.safetensors"))
    ]


def _check(stack: Stack) -> Check:
    return check_recording(stack.root / "wire", _private_files(stack))


def _extractor(stack: Stack, device: str, generation: int) -> dict[str, np.ndarray]:
    path = sorted(stack.store(device).glob("generations/*/state.safetensors"))[generation]
    tensors = {
        name: value
        for name, value in load_file(path).items()
        if "extractor" in name and "shadow" not in name and "best" not in name
    }
    assert tensors, f"{path} holds no extractor"
    return tensors


def test_no_tensor_or_byte_of_a_trained_private_part_crosses_the_wire(recorded: Stack) -> None:
    check = _check(recorded)
    assert check.artifacts >= 10
    assert check.private_tensors >= 3 * 2 * 4, "two generations of each device, extractor and discriminator"
    assert check.matches == ()


def test_only_the_allowed_parts_and_fields_are_seen_by_the_observer(recorded: Stack) -> None:
    record = json.loads((recorded.root / "wire" / "wire.json").read_text())
    updates = [entry for entry in record["artifacts"] if entry["kind"] == "update"]
    assert {part for entry in updates for part in entry["parts"]} == {"classifier", "generator"}
    assert {field for entry in updates for field in entry["report"]} <= {
        "examples",
        "accuracy",
        "loss",
        "health",
        "shadow",
    }


@pytest.mark.parametrize("coding", ["f32", "f16", "i8_delta"])
def test_the_same_check_fails_when_a_device_plants_its_extractor(recorded: Stack, coding: str) -> None:
    extractor = _extractor(recorded, THIEF, -1)
    base = _extractor(recorded, THIEF, 0)
    planted = as_artifact(extractor, base, coding, federation="shapes", client=THIEF)
    before = _recorded(recorded)
    _publish(recorded, planted.update, planted.bases)
    wait_for(lambda: _recorded(recorded) >= before + 1 + len(planted.bases), "the planted artifact is recorded", 20)
    leaks = [
        match for match in _check(recorded).matches if match.artifact.startswith(make_ref(planted.update, 4096).id)
    ]
    assert {match.owner for match in leaks} >= {str(max(recorded.store(THIEF).glob("generations/*/state.safetensors")))}


def _publish(stack: Stack, update: bytes, bases: tuple[bytes, ...]) -> None:
    """Send artifacts with the real identity of a device: manifest and frames on its own topics."""
    folder = stack.root / "devices" / THIEF
    tls = TlsFiles(ca=folder / "tls" / "ca.pem", cert=folder / "tls" / "device.pem", key=folder / "tls" / "device.key")
    transport = MqttTransport(MqttConfig(host="127.0.0.1", port=stack.broker_port, identity=THIEF, tls=tls))
    links: list[bool] = []
    transport.start(lambda delivery: None, links.append)
    try:
        wait_for(lambda: True in links, "the thief is connected", 20)
        topics = Topics("shapes")
        for data in (*bases, update):
            ref = make_ref(data, 4096)
            manifest = Manifest(
                federation="shapes", sender=THIEF, recipient=COORDINATOR, artifact=ref, round=2, attempt=1
            )
            transport.publish(topics.up_control(THIEF), seal(manifest, SigningKey.load(folder / "signing.key")))
            for frame in frames_for(data, ref):
                transport.publish(topics.up_chunk(THIEF), frame)
        ids = {make_ref(data, 4096).id for data in (*bases, update)}
        seen = stack.root / "wire" / "artifacts"
        wait_for(lambda: ids <= {path.name for path in seen.iterdir()}, "the frames crossed the broker", 20)
    finally:
        transport.close()
