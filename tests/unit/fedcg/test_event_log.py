"""The event log: bounded, shared by several processes, and readable after a full disk or a power cut."""

import ast
import io
import logging
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcg import event_log
from fedcg.event_log import EventLog, log_text, read_events
from fedcg.log_output import LogForm, LogSettings, set_up_log
from fedcg.sentences import sentence_of

ROOT = Path(__file__).parents[3]


def written_events() -> set[str]:
    """The names with which the programs call `EventLog.write`."""
    names: set[str] = set()
    for package in ("coordinator", "edge_client", "fedcg"):
        for file in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("events.write"):
                    names |= {str(name.value) for name in node.args[:1] if isinstance(name, ast.Constant)}
    return names


def test_the_docstring_names_every_event() -> None:
    written = written_events()
    assert {"agent_started", "started"} <= written
    assert written - set(re.findall(r"[a-z_]+", event_log.__doc__ or "")) == set()


def test_every_event_has_a_sentence_but_the_steps_and_the_plan_of_a_training() -> None:
    unnamed = {
        "problem_opened",
        "problem_closed",
        "enrolment_limited",
        "carrier_refused",
        "aggregate_step",
    }  # by variables
    without = {
        name for name in written_events() | unnamed if sentence_of({"event": name, "others": "different"}) is None
    }
    assert without == {"plan", "progress"}


@given(st.text(max_size=300), st.integers(1, 200))
def test_a_text_enters_a_log_as_one_bounded_line_that_steers_no_terminal(text: str, most: int) -> None:
    assert log_text(text, most).isprintable()
    assert log_text(text) == text or not text.isprintable()
    assert len(log_text("x" * 300, most)) == most


@pytest.mark.parametrize("form", list(LogForm))
def test_no_text_of_a_peer_begins_a_line_of_the_console(form: LogForm, tmp_path: Path) -> None:
    stream, forged = io.StringIO(), "x\n2026-11-26 06:00:00 [info] FORGED\x1b[2J\u202e\x9b2J"
    root = logging.getLogger()
    kept, level = root.handlers[:], root.level
    try:
        set_up_log(LogSettings(form), stream)
        EventLog(tmp_path / "events.jsonl", lambda: 1.0).write("agent_error", detail=forged)
        logging.getLogger("any").warning("no such thing: %s", forged)
        logging.getLogger("any").error("it failed", exc_info=ValueError(forged))
    finally:
        root.handlers[:] = kept
        root.setLevel(level)
    lines = stream.getvalue().splitlines()
    assert all(line.isprintable() for line in lines)
    assert not [line for line in lines if "FORGED" in line and line.startswith("2026-11-26 06:00:00")]
    assert sum("FORGED" in line for line in lines) >= 3
    assert str(next(read_events(tmp_path / "events.jsonl"))["detail"]).isprintable()


def test_torn_lines_are_left_out_and_the_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventLog(path, lambda: 1.0)
    log.write("first")
    with path.open("ab") as file:
        file.write(b'{"t": 1.0, "eve')  # the disk was full in the middle of a line
    log.write("glued")
    log.write("second", step=2)
    with path.open("ab") as file:
        file.write(b'{"t": 1.0')
    assert [event["event"] for event in read_events(path)] == ["first", "second"]


def test_a_log_that_is_written_for_ever_keeps_one_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "ROTATE_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    writers = [EventLog(path, lambda: 1.0), EventLog(path, lambda: 1.0)]
    for step in range(200):
        writers[step % 2].write("progress", step=step)
    sizes = [file.stat().st_size for file in tmp_path.iterdir()]
    assert len(sizes) == 2
    assert max(sizes) < 1100
    kept = [event["step"] for name in ("events.old.jsonl", "events.jsonl") for event in read_events(tmp_path / name)]
    assert kept == list(range(200 - len(kept), 200))
