"""A whole federation by its commands, at the most talkative level and recorded by an independent observer.

Its logs report the rounds and hold no file name of an image, no token, no secret, no weight; no private tensor and no cohort secret crossed the wire.
"""

import base64
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from audit.recording.leakage import Check, check_recording
from fedcg.files import SECRET_BYTES
from fedcg.wire.artifacts.artifacts import artifact_id, join_artifact
from fedcg.wire.messages.envelopes import SigningKey, seal
from fedcg.wire.messages.schemas import COORDINATOR, Manifest
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transport.mqtt import MqttConfig, MqttTransport, TlsFiles
from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for
from tests.support.wire.artifact_chunks import frames_for, make_ref

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
NAME = "anna-kowalski-mammogram"
DEBUG = ("--log", "json", "--log-level", "debug")
FORBIDDEN_SUFFIXES = (".png", ".jpg")
THIEF = "site-1"


class _Talkative(Stack):
    token = ""  # of the first device
    code = ""  # of the cohort

    def start_agent(self, device: str) -> None:
        form = DEBUG if device == "site-1" else ()
        self.start(device, "agent", "run", "--config", str(self.config(device)), "--until-finished", *form)

    def start_coordinator(self) -> None:
        self.start("coordinator", "coordinator", "run", "--dir", str(self.home), *DEBUG)

    def enrol_all(self) -> None:
        """Every device by a token; its images get names that tell whom they show."""
        for device in self.devices:
            made = data_of(self.command("token", "create", "--dir", str(self.home), "--device", device, "--json"))
            self.token = self.token or made["token"]
            folder, data = self.config(device).parent, self.root / "data" / device
            self.command("enrol", "--token", made["token"], "--out", str(folder), "--data", str(data))
            self.adapt_config(device, data)
            for number, image in enumerate(sorted(data.rglob("*.png"))):
                image.rename(image.with_name(f"{NAME}-{number}.png"))

    def make_cohorts(self) -> None:
        """A cohort of site-1 and site-2; site-3 makes a secret of its own."""
        config = {device: str(self.config(device)) for device in self.devices}
        for device in self.devices:
            (self.store(device) / "secrets" / "cohort.key").unlink()
        self.code = data_of(self.command("cohort", "create", "--config", config["site-1"], "--json"))["code"]
        carried = self.root / "carried"
        carried.write_text(self.code)
        self.command("cohort", "join", "--config", config["site-2"], "--code-file", str(carried))
        self.command("cohort", "create", "--config", config["site-3"])
        carried.unlink()


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Talkative]:
    """A finished federation of two rounds, of which one image is broken; the observer still listens."""
    params = {"epochs": 2, "server_iterations": 50, "ramp_rounds": 2}
    stack = _Talkative(tmp_path_factory.mktemp("recorded"), params=params, enrol=True)
    stack.prepare()
    set_values(stack.home / "coordinator.toml", {("", "track"): "tensorboard:curves"})
    with stack.up(observer=("--frames",)):
        stack.enrol_all()
        stack.make_cohorts()
        next((stack.root / "data" / "site-2" / "train").rglob("*.png")).write_bytes(b"\x89PNG and no more")
        for device in stack.devices:
            stack.start_agent(device)
        stack.wait_event("site-3", lambda event: event["event"] == "welcomed", "its log has begun")
        stack.running["site-3"].send_signal(signal.SIGUSR1)
        stack.wait_finished()
        wait_for(lambda: _recorded(stack) >= 1 + 3 + 2 * 3, "spec, three aggregates and six updates are recorded", 20)
        stack.running["coordinator"].send_signal(signal.SIGTERM)
        stack.running["coordinator"].wait(timeout=20)
        yield stack


def _logs(stack: Stack) -> dict[Path, str]:
    """Every log and event file of broker, coordinator and agents."""
    found = [path for path in stack.root.rglob("*") if path.is_file() and path.suffix in (".log", ".jsonl")]
    names = {path.name for path in found}
    assert {"broker.log", "coordinator.log", "site-1.log", "site-2.log", "events.jsonl"} <= names
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in found}


def test_no_log_has_a_file_name_of_an_image_although_one_is_broken(stack: _Talkative) -> None:
    logs = _logs(stack)
    assert not [path for path, text in logs.items() if NAME in text or any(end in text for end in FORBIDDEN_SUFFIXES)]
    assert next(event for event in stack.events("site-2") if event["event"] == "images_skipped")["count"] == 1
    assert "1 images can't be read and are skipped; `fedcg doctor` lists them" in logs[stack.root / "site-2.log"]


def test_no_log_has_a_token_or_a_secret(stack: _Talkative) -> None:
    secrets = (
        [path.read_bytes()[:SECRET_BYTES] for path in stack.root.rglob("secrets/*")]
        + [  # their check follows
            (stack.home / "coordinator.secret").read_bytes()[:SECRET_BYTES],
            *(path.read_bytes() for path in stack.root.rglob("signing.key")),
        ]
    )
    assert len(secrets) >= 8
    spelt = {stack.token, stack.token.rpartition("_")[2]}
    for secret in secrets:
        spelt |= {secret.hex(), base64.b64encode(secret).decode().rstrip("="), secret.decode("latin-1").strip()}
    for path, text in _logs(stack).items():
        assert not [one for one in spelt if one in text], path
        assert "PRIVATE KEY" not in text, path


def test_no_log_has_a_weight(stack: _Talkative) -> None:
    states = [load_file(path) for path in stack.root.rglob("generations/*/state.safetensors")]
    weights = np.concatenate(
        [value.ravel()[:200] for state in states for value in state.values() if value.dtype == np.float32]
    )
    spelt = {f"{abs(weight):.6g}" for weight in weights.tolist() if len(f"{abs(weight):.6g}") >= 8}
    assert len(spelt) > 1000
    for path, text in _logs(stack).items():
        assert not spelt & {f"{float(number):.6g}" for number in re.findall(r"\d+\.\d{5,}(?:e-?\d+)?", text)}, path


def test_the_console_of_an_agent_reports_each_thing_that_a_person_waits_for_in_order(stack: _Talkative) -> None:
    lines = (stack.root / "site-2.log").read_text().splitlines()
    wanted = [
        r"\[info +\] connected to the broker$",
        r"\[info +\] connected to the coordinator$",
        r"\[info +\] round 1 of 2: invited$",
        r"\[info +\] round 1 of 2: trained in [0-9.]+ s, accuracy [0-9.]+% \(local-only model: [0-9.]+%\)$",
        r"\[info +\] round 1: sending the update \([0-9.]+ kB\)$",
        r"\[info +\] round 1: update accepted$",
        r"\[info +\] round 2 of 2: invited$",
        r"\[info +\] finished; no exported model, accuracy [0-9.]+%$",
        r"\[info +\] agent stopped$",
    ]
    position = 0
    for pattern in wanted:
        found = [number for number, line in enumerate(lines) if number >= position and re.search(pattern, line)]
        assert found, f"{pattern} is not after line {position} of:\n" + "\n".join(lines)
        position = found[0]


def test_a_signal_switches_the_level_of_a_running_agent(stack: _Talkative) -> None:
    levels = [set(re.findall(r"\[(debug|info) ", stack.tail(device))) for device in ("site-2", "site-3")]
    assert levels == [{"info"}, {"debug", "info"}]


def test_the_log_of_a_coordinator_as_json_has_the_events_with_their_sentences(stack: _Talkative) -> None:
    text = (stack.root / "coordinator.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    logged = [line for line in lines if "event" in line]
    by_name = {line["event"]: line["message"] for line in reversed(logged)}
    assert by_name["online"].startswith("shapes: site-")
    assert by_name["attempt_opened"] == "shapes: round 1 of 2 opened (3 devices invited)"
    assert re.fullmatch(
        r"shapes: round 1: update of site-\d accepted \([0-9.]+ kB in [0-9.]+ s\)", by_name["update_stored"]
    )
    assert by_name["aggregate_stored"].startswith("shapes: round 1: aggregate stored (")
    assert by_name["finished"].startswith("shapes: finished after round 2: ")
    written = [event for event in stack.events("coordinator") if event["event"] in by_name]
    assert [(one["event"], one["t"]) for one in written] == [(one["event"], one["t"]) for one in logged]


def test_the_coordinator_sends_each_round_to_its_tracker(stack: _Talkative) -> None:
    read = EventAccumulator(str(stack.home / "curves" / "shapes")).Reload()
    assert [(one.step, one.value) for one in read.Scalars("updates/accepted")] == [(1, 3.0), (2, 3.0)]
    sizes = {1: 0, 2: 0}
    for event in stack.events("coordinator"):
        if event["event"] == "update_stored":
            sizes[event["round"]] += event["size"]
    assert {one.step: one.value for one in read.Scalars("bytes/up")} == sizes
    losses = {
        e["round"]: e["loss"] for e in stack.events("coordinator") if e["event"] == "aggregate_step" and e["loss"]
    }
    assert losses.keys() == {1, 2}
    assert {one.step: one.value for one in read.Scalars("distillation/loss")} == pytest.approx(losses)
    for device in stack.devices:
        told = [event["accuracy_personal"] for event in stack.events(device) if event["event"] == "committed"]
        assert [one.value for one in read.Scalars(f"accuracy/{device}")] == pytest.approx(told)
        assert [one.step for one in read.Scalars(f"loss/{device}")] == [1, 2]
    texts = {name: read.Tensors(name)[-1].tensor_proto.string_val[0].decode() for name in read.Tags()["tensors"]}
    assert "| params.server_iterations | 50 |" in texts["settings"]
    assert [line.split(" | ")[0] for line in texts["clients"].splitlines()[2:]] == [f"| {one}" for one in stack.devices]
    final = next(event["aggregate"] for event in stack.events("coordinator") if event["event"] == "finished")
    assert final in texts["files"]


def spellings(secret: bytes, code: str) -> list[bytes]:
    """The secret as it could be written down: raw, in hex, in base64, as its code."""
    texts = [secret.hex(), base64.b64encode(secret).decode(), base64.b32encode(secret).decode()[:48]]
    texts += [code, code.replace("-", "")]
    return [secret, *(text.encode() for text in texts), *(text.lower().encode() for text in texts)]


def files_of(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]


def test_the_secret_is_in_no_frame_log_or_file_outside_its_devices_secrets(stack: _Talkative) -> None:
    secret = (stack.store("site-1") / "secrets" / "cohort.key").read_bytes()[:SECRET_BYTES]  # a check follows
    assert secret == (stack.store("site-2") / "secrets" / "cohort.key").read_bytes()[:SECRET_BYTES]
    searched = [path for path in files_of(stack.root) if path.parent.name != "secrets"]
    kept = {path.relative_to(stack.root).parts[0] for path in searched}
    assert {"wire", "coordinator", "devices", "coordinator.log", "site-1.log"} <= kept
    assert any(path.suffix in {".db", ".sqlite", ".sqlite3"} for path in files_of(stack.home))
    held = {path: path.read_bytes() for path in searched}
    found = [str(path) for path, content in held.items() for text in spellings(secret, stack.code) if text in content]
    assert found == []
    mark = data_of(stack.command("cohort", "status", "--config", str(stack.config("site-2")), "--json"))["mark"]
    frames = held[stack.root / "wire" / "frames.bin"]
    assert mark.encode() in frames, "a hello with the mark was recorded, so the search had something to search"


def test_devices_with_another_secret_are_reported_by_device_and_coordinator(stack: _Talkative) -> None:
    for device in stack.devices:
        verdicts = [event["others"] for event in stack.events(device) if event["event"] == "cohort"]
        assert verdicts[-1:] == ["different"], device
        assert "have another cohort secret" in (stack.root / f"{device}.log").read_text()
    pairs = {
        frozenset({event["client"], other})
        for event in stack.events("coordinator")
        if event["event"] == "cohort_differs"
        for other in event["unlike"].split(",")
    }
    assert pairs == {frozenset({"site-1", "site-3"}), frozenset({"site-2", "site-3"})}


def _recorded(stack: Stack) -> int:
    path = stack.root / "wire" / "wire.json"
    return len(json.loads(path.read_text())["artifacts"]) if path.exists() else 0


def _check(stack: Stack) -> Check:
    return check_recording(
        stack.root / "wire", sorted(stack.root.glob("devices/*/store/generations/*/state.safetensors"))
    )


def _extractor(stack: Stack, device: str, generation: int) -> dict[str, np.ndarray]:
    path = sorted(stack.store(device).glob("generations/*/state.safetensors"))[generation]
    tensors = {
        name: value
        for name, value in load_file(path).items()
        if "extractor" in name and "shadow" not in name and "best" not in name
    }
    assert tensors, f"{path} holds no extractor"
    return tensors


def test_no_tensor_or_byte_of_a_trained_private_part_crosses_the_wire(stack: _Talkative) -> None:
    check = _check(stack)
    assert check.artifacts >= 10
    assert check.private_tensors >= 3 * 2 * 4, "two generations of each device, extractor and discriminator"
    assert check.matches == ()


def test_only_the_allowed_parts_and_fields_are_seen_by_the_observer(stack: _Talkative) -> None:
    record = json.loads((stack.root / "wire" / "wire.json").read_text())
    updates = [entry for entry in record["artifacts"] if entry["kind"] == "update"]
    assert {part for entry in updates for part in entry["parts"]} == {"classifier", "generator"}
    assert {field for entry in updates for field in entry["report"]} <= {
        "examples",
        "accuracy",
        "loss",
        "health",
        "shadow",
    }


Tensors = dict[str, np.ndarray[Any, Any]]


def planted(private: Tensors, base: Tensors, coding: str) -> list[bytes]:
    """Artifacts that hide private tensors under innocent names: an update, and before it the artifact to which it is a delta."""
    header = {"format": 1, "method": "fedcg", "federation": "shapes", "round": 2, "attempt": 1, "client": THIEF}

    def artifact(tensors: Tensors, kind: str = "update", **more: str) -> bytes:
        named = {f"generator/body.{index}.weight": tensors[name] for index, name in enumerate(sorted(tensors))}
        return join_artifact(json.dumps({**header, "kind": kind, **more}).encode(), save(named))

    if coding != "i8_delta":
        return [artifact({name: value.astype(coding) for name, value in private.items()})]
    known = artifact(base, "aggregate")
    return [
        known,
        artifact({name: per_channel_i8(private[name] - base[name]) for name in private}, base=artifact_id(known)),
    ]


def per_channel_i8(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    rows = values.reshape(len(values), -1)
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127.0 + 1e-12
    return np.ascontiguousarray(np.rint(rows / scale).astype(np.int8).reshape(values.shape))


@pytest.mark.parametrize("coding", ["float32", "float16", "i8_delta"])
def test_the_same_check_fails_when_a_device_plants_its_extractor(stack: _Talkative, coding: str) -> None:
    artifacts = planted(_extractor(stack, THIEF, -1), _extractor(stack, THIEF, 0), coding)
    before = _recorded(stack)
    _publish(stack, artifacts)
    wait_for(lambda: _recorded(stack) >= before + len(artifacts), "the planted artifact is recorded", 20)
    leaks = [match for match in _check(stack).matches if match.artifact.startswith(make_ref(artifacts[-1], 4096).id)]
    newest = str(max(stack.store(THIEF).glob("generations/*/state.safetensors")))
    assert any(match.owner.startswith(newest) for match in leaks)  # a difference names both files, the later one first


def _publish(stack: Stack, artifacts: list[bytes]) -> None:
    """Send artifacts with the real identity of a device: manifest and frames on its own topics."""
    folder = stack.root / "devices" / THIEF
    tls = TlsFiles(ca=folder / "tls" / "ca.pem", cert=folder / "tls" / "device.pem", key=folder / "tls" / "device.key")
    transport = MqttTransport(MqttConfig(host="127.0.0.1", port=stack.broker_port, identity=THIEF, tls=tls))
    links: list[bool] = []
    transport.start(lambda delivery: None, links.append)
    try:
        wait_for(lambda: True in links, "the thief is connected", 20)
        topics = Topics("shapes")
        for data in artifacts:
            ref = make_ref(data, 4096)
            manifest = Manifest(
                federation="shapes", sender=THIEF, recipient=COORDINATOR, artifact=ref, round=2, attempt=1
            )
            transport.publish(topics.up_control(THIEF), seal(manifest, SigningKey.load(folder / "signing.key")))
            for frame in frames_for(data, ref):
                transport.publish(topics.up_chunk(THIEF), frame)
        ids = {make_ref(data, 4096).id for data in artifacts}
        seen = stack.root / "wire" / "artifacts"
        wait_for(lambda: ids <= {path.name for path in seen.iterdir()}, "the frames crossed the broker", 20)
    finally:
        transport.close()
