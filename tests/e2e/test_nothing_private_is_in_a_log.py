"""A whole federation by its commands, at the most talkative level: its logs report the rounds, and hold no file name of an image, no token, no secret, no weight."""

import base64
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedcg.files import SECRET_BYTES
from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
NAME = "anna-kowalski-mammogram"
DEBUG = ("--log", "json", "--log-level", "debug")
FORBIDDEN_SUFFIXES = (".png", ".jpg")


class _Talkative(Stack):
    def start_agent(self, device: str) -> None:
        form = DEBUG if device == "site-1" else ()
        self.start(device, "agent", "run", "--config", str(self.config(device)), "--until-finished", *form)

    def start_coordinator(self) -> None:
        self.start("coordinator", "coordinator", "run", "--dir", str(self.home), *DEBUG)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """A federation of which one image is broken and one device enrolled by a token; gives the token too."""
    root = tmp_path_factory.mktemp("logs")
    stack = _Talkative(root, params={"epochs": 1, "server_iterations": 10}, enrol=True, min_clients=3)
    stack.prepare()
    set_values(stack.home / "coordinator.toml", {("tensorboard", "directory"): "curves"})
    with stack.up():
        tokens = []
        for device in stack.devices:
            made = data_of(stack.command("token", "create", "--dir", str(stack.home), "--device", device, "--json"))
            tokens.append(made["token"])
            folder, data = stack.config(device).parent, stack.root / "data" / device
            stack.command("enrol", "--token", made["token"], "--out", str(folder), "--data", str(data))
            stack.adapt_config(device, data)
            for number, image in enumerate(sorted(data.rglob("*.png"))):
                image.rename(image.with_name(f"{NAME}-{number}.png"))
        broken = next((stack.root / "data" / "site-2" / "train").rglob("*.png"))
        broken.write_bytes(b"\x89PNG and no more")
        for device in stack.devices:
            stack.start_agent(device)
        stack.wait_finished()
        stack.running["coordinator"].send_signal(signal.SIGTERM)
        stack.running["coordinator"].wait(timeout=20)
        yield stack, tokens[0]


def _logs(stack: Stack) -> dict[Path, str]:
    """Every log and event file of broker, coordinator and agents."""
    found = [path for path in stack.root.rglob("*") if path.is_file() and path.suffix in (".log", ".jsonl")]
    names = {path.name for path in found}
    assert {"broker.log", "coordinator.log", "site-1.log", "site-2.log", "events.jsonl"} <= names
    return {path: path.read_text(encoding="utf-8", errors="replace") for path in found}


def test_no_log_has_a_file_name_of_an_image_although_one_is_broken(finished: tuple[Stack, str]) -> None:
    stack, _ = finished
    logs = _logs(stack)
    assert not [path for path, text in logs.items() if NAME in text or any(end in text for end in FORBIDDEN_SUFFIXES)]
    skipped = [event for event in stack.events("site-2") if event["event"] == "images_skipped"]
    assert skipped[0]["count"] == 1
    assert "1 images can't be read and are left out; `fedcg doctor` names them" in logs[stack.root / "site-2.log"]


def test_no_log_has_a_token_or_a_secret(finished: tuple[Stack, str]) -> None:
    stack, token = finished
    secrets = (
        [path.read_bytes()[:SECRET_BYTES] for path in stack.root.rglob("secrets/*")]
        + [  # their check follows
            (stack.home / "coordinator.secret").read_bytes()[:SECRET_BYTES],
            *(path.read_bytes() for path in stack.root.rglob("signing.key")),
        ]
    )
    assert len(secrets) >= 8
    spelt = {token, token.rpartition("_")[2]}
    for secret in secrets:
        spelt |= {secret.hex(), base64.b64encode(secret).decode().rstrip("="), secret.decode("latin-1").strip()}
    for path, text in _logs(stack).items():
        assert not [one for one in spelt if one in text], path
        assert "PRIVATE KEY" not in text, path


def test_no_log_has_a_weight(finished: tuple[Stack, str]) -> None:
    stack, _ = finished
    states = [load_file(path) for path in stack.root.rglob("generations/*/state.safetensors")]
    weights = np.concatenate(
        [value.ravel()[:200] for state in states for value in state.values() if value.dtype == np.float32]
    )
    spelt = {f"{abs(weight):.6g}" for weight in weights.tolist() if len(f"{abs(weight):.6g}") >= 8}
    assert len(spelt) > 1000
    for path, text in _logs(stack).items():
        numbers = {f"{float(number):.6g}" for number in re.findall(r"\d+\.\d{5,}(?:e-?\d+)?", text)}
        assert not spelt & numbers, path


def test_the_console_of_an_agent_reports_each_thing_that_a_person_waits_for_in_order(
    finished: tuple[Stack, str],
) -> None:
    stack, _ = finished
    lines = (stack.root / "site-2.log").read_text().splitlines()
    wanted = [
        r"\[info +\] connected to the broker$",
        r"\[info +\] joined: the coordinator answered$",
        r"\[info +\] round 1 of 2: invited$",
        r"\[info +\] round 1 of 2: trained in [0-9.]+ s, accuracy [0-9.]+% \(trained alone: [0-9.]+%\)$",
        r"\[info +\] round 1: the update is being sent \([0-9.]+ kB\)$",
        r"\[info +\] round 1: the update is accepted$",
        r"\[info +\] round 2 of 2: invited$",
        r"\[info +\] finished; no exported model, accuracy [0-9.]+%$",
        r"\[info +\] agent stopped$",
    ]
    position = 0
    for pattern in wanted:
        found = [number for number, line in enumerate(lines) if number >= position and re.search(pattern, line)]
        assert found, f"{pattern} is not after line {position} of:\n" + "\n".join(lines)
        position = found[0]


def test_the_log_of_a_coordinator_as_json_has_the_events_with_their_sentences(finished: tuple[Stack, str]) -> None:
    stack, _ = finished
    text = (stack.root / "coordinator.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    logged = [line for line in lines if "event" in line]
    by_name = {line["event"]: line["message"] for line in reversed(logged)}
    assert by_name["online"].startswith("shapes: site-")
    assert by_name["attempt_opened"] == "shapes: round 1 of 2 opened (3 devices invited)"
    assert re.fullmatch(
        r"shapes: round 1: the update of site-\d is accepted \([0-9.]+ kB in [0-9.]+ s\)", by_name["update_stored"]
    )
    assert by_name["aggregate_stored"].startswith("shapes: round 1: aggregate stored (")
    assert by_name["finished"].startswith("shapes: finished after round 2: ")
    written = [event for event in stack.events("coordinator") if event["event"] in by_name]
    assert [(one["event"], one["t"]) for one in written] == [(one["event"], one["t"]) for one in logged]


def test_the_coordinator_writes_curves_of_each_round_for_tensorboard(finished: tuple[Stack, str]) -> None:
    stack, _ = finished
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


def test_a_signal_switches_the_level_of_a_running_coordinator_and_back(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "quiet", rounds=1, params={"epochs": 1, "server_iterations": 1})

    def levels() -> list[str]:
        return re.findall(r"\[(debug|info) ", (stack.root / "coordinator.log").read_text())

    with stack.up():
        assert set(levels()) == {"info"}
        stack.running["coordinator"].send_signal(signal.SIGUSR1)
        for device in stack.devices:
            stack.start_agent(device)
        wait_for(lambda: "debug" in levels(), "lines of level debug")
        stack.wait_finished()
        stack.running["coordinator"].send_signal(signal.SIGUSR1)
        stack.running["coordinator"].send_signal(signal.SIGTERM)
        wait_until(lambda: stack.running["coordinator"].poll() is not None, "its end")
