"""`fedcg agent logs`: sentences and raw events of a device, from a moment on, and followed over a rotation."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedcg.errors import BAD_INPUT, NOT_FOUND
from fedcg.event_log import EventLog, follow_events
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.world import write_device
from tests.support.waiting import wait_until


@pytest.fixture
def config(tmp_path: Path) -> Path:
    made = write_device(tmp_path / "box")
    (tmp_path / "box" / "store").mkdir()
    return made


def log(config: Path, t: float) -> EventLog:
    return EventLog(config.parent / "store" / "events.jsonl", lambda: t)


def test_the_events_of_a_device_are_printed_as_sentences(config: Path) -> None:
    log(config, 1.0).write("link", up=True, down_s=None)
    log(config, 2.0).write("phase_started", phase="load", round=1, attempt=1)
    log(config, 3.0).write("declined", round=1, attempt=1, rounds=9, reason="no_data", detail="/srv: no images")
    done = run_fedcg("agent", "logs", "--config", config)
    first, second = done.output.splitlines()
    assert first.endswith("[info     ] connected to the broker")
    assert (
        "[warning  ] round 1 of 9: declined (no_data): /srv: no images. What to do: put images where [data] root"
        in second
    )
    assert "load begins" in run_fedcg("agent", "logs", "--config", config, "--verbose").output


def test_since_takes_a_span_or_a_time_and_json_gives_the_events(config: Path) -> None:
    now = time.time()
    log(config, now - 7200).write("welcomed", epoch=1)
    log(config, now - 60).write("welcomed", epoch=2)
    words = ("agent", "logs", "--config", config, "--json", "--since")
    assert [data_of(line)["epoch"] for line in run_fedcg(*words, "1h").output.splitlines()] == [2]
    assert [data_of(line)["epoch"] for line in run_fedcg(*words, "2020-01-01").output.splitlines()] == [1, 2]
    assert run_fedcg(*words, "2999-01-01T00:00Z").output == ""


@pytest.mark.parametrize(("words", "why"), [(("--since", "soon"), "give 10m, 2h, 3d"), ((), "is not there yet")])
def test_what_can_not_be_printed_is_bad_input(config: Path, words: tuple[str, ...], why: str) -> None:
    if words:
        log(config, 1.0).write("welcomed", epoch=1)
    command = [sys.executable, "-m", "fedcg", "agent", "logs", "--config", str(config), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == (BAD_INPUT if words else NOT_FOUND)
    assert why in done.stderr


def test_a_followed_log_goes_on_after_its_rotation_without_a_gap(config: Path) -> None:
    path = config.parent / "store" / "events.jsonl"
    log(config, 1.0).write("welcomed", epoch=1)
    found: list[object] = []

    def follow() -> None:
        for event in follow_events(path, 0.02):
            found.append(event["epoch"])
            if event["epoch"] == 4:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    wait_until(lambda: found == [1], "the first event")
    log(config, 2.0).write("welcomed", epoch=2)
    path.replace(path.with_suffix(".old.jsonl"))
    with path.with_suffix(".old.jsonl").open("a") as late:  # a process that has the old file open still
        late.write('{"t": 3, "event": "welcomed", "epoch": 3}\n')
    log(config, 4.0).write("welcomed", epoch=4)
    thread.join(20)
    assert found == [1, 2, 3, 4]
