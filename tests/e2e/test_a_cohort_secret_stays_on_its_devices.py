"""A cohort made by its commands, then a round over a real broker: the secret is in nothing that crossed it or that the coordinator has."""

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.files import SECRET_BYTES
from tests.support.commands import data_of
from tests.support.stack import Stack

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """A finished one-round federation, every frame of it recorded, and the cohort's code; site-3 made a secret of its own."""
    params = {"epochs": 1, "server_iterations": 10}
    stack = Stack(root=tmp_path_factory.mktemp("cohort"), params=params, rounds=1)
    stack.prepare()
    for device in stack.devices:
        (stack.store(device) / "secrets" / "cohort.key").unlink()
    config = {device: str(stack.config(device)) for device in stack.devices}
    code = data_of(stack.command("cohort", "create", "--config", config["site-1"], "--json"))["code"]
    carried = stack.root / "carried"
    carried.write_text(code)
    stack.command("cohort", "join", "--config", config["site-2"], "--code-file", str(carried))
    stack.command("cohort", "create", "--config", config["site-3"])
    carried.unlink()
    with stack.up(agents=True, observer=("--frames",)):
        stack.wait_finished()
        yield stack, code


def spellings(secret: bytes, code: str) -> list[bytes]:
    """The secret as it could be written down: raw, in hex, in base64, as its code."""
    texts = [secret.hex(), base64.b64encode(secret).decode(), base64.b32encode(secret).decode()[:48]]
    texts += [code, code.replace("-", "")]
    return [secret, *(text.encode() for text in texts), *(text.lower().encode() for text in texts)]


def files_of(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]


def test_the_secret_is_in_no_frame_log_or_file_outside_its_devices_secrets(finished: tuple[Stack, str]) -> None:
    stack, code = finished
    secret = (stack.store("site-1") / "secrets" / "cohort.key").read_bytes()[:SECRET_BYTES]  # a check follows
    assert secret == (stack.store("site-2") / "secrets" / "cohort.key").read_bytes()[:SECRET_BYTES]
    searched = [path for path in files_of(stack.root) if path.parent.name != "secrets"]
    kept = {path.relative_to(stack.root).parts[0] for path in searched}
    assert {"wire", "coordinator", "devices", "coordinator.log", "site-1.log"} <= kept
    assert any(path.suffix in {".db", ".sqlite", ".sqlite3"} for path in files_of(stack.home))
    held = {path: path.read_bytes() for path in searched}
    found = [str(path) for path, content in held.items() for text in spellings(secret, code) if text in content]
    assert found == []
    mark = data_of(stack.command("cohort", "status", "--config", str(stack.config("site-2")), "--json"))["mark"]
    frames = held[stack.root / "wire" / "frames.bin"]
    assert mark.encode() in frames, "a hello with the mark was recorded, so the search had something to search"


def test_devices_with_another_secret_are_reported_by_device_and_coordinator(finished: tuple[Stack, str]) -> None:
    stack, _ = finished
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
