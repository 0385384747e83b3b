"""SIGKILL or SIGSTOP for each process while its phase is demonstrably under way; the final aggregate must be that of an undisturbed run."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.timeout(280)]

# Small enough for seconds, long enough that a phase can be caught in the middle.
PARAMS = {"epochs": 4, "server_iterations": 600, "server_batch": 16, "ramp_rounds": 2}
VICTIM = "site-2"
STALL_S = 6.0


def _stack(root: Path) -> Stack:
    return Stack(root=root, params=PARAMS, rounds=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the final aggregate of a run that nobody disturbs."""
    stack = _stack(tmp_path_factory.mktemp("undisturbed"))
    try:
        stack.prepare()
        stack.start_all()
        stack.wait_finished()
        return stack.final_aggregate()
    finally:
        stack.stop()


@pytest.fixture
def stack(tmp_path: Path) -> Any:
    stack = _stack(tmp_path)
    stack.prepare()
    set_values(stack.config(VICTIM), {("training", "stall_s"): STALL_S})
    stack.start_all()
    yield stack
    stack.stop()


def _under_way(event: dict[str, Any]) -> bool:
    """Progress inside the generator phase of round 1, after its first step."""
    return bool(
        event["event"] == "progress" and event["phase"] == "generate" and event["round"] == 1 and event["step"] > 0
    )


def _entries(stack: Stack, of: str, phase: str, round_number: int) -> list[dict[str, Any]]:
    return [
        event
        for event in stack.events(of)
        if event["event"] == "phase_started" and event["phase"] == phase and event["round"] == round_number
    ]


def _committed(stack: Stack) -> list[tuple[int, int]]:
    return [(event["round"], event["attempt"]) for event in stack.events(VICTIM) if event["event"] == "committed"]


def _distilling(event: dict[str, Any]) -> bool:
    return bool(
        event["event"] == "aggregate_step" and event["phase"] == "distil" and event["round"] == 1 and event["step"] > 0
    )


REPLACED = {  # whose process, while it does what, by which signal, and the phase that is entered twice
    "killed trainer": (VICTIM, _under_way, signal.SIGKILL, "classify"),
    "stopped trainer": (VICTIM, _under_way, signal.SIGSTOP, "classify"),
    "killed aggregation worker": ("coordinator", _distilling, signal.SIGKILL, "distil"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", REPLACED)
def test_a_process_that_is_killed_or_hangs_is_replaced_and_the_result_is_the_same(
    stack: Stack, undisturbed: str, case: str
) -> None:
    of, is_under_way, by, phase = REPLACED[case]
    progress = stack.wait_event(of, is_under_way, f"the {phase} phase is under way")
    os.kill(progress["pid"], by)
    stack.wait_finished()
    assert len({event["pid"] for event in _entries(stack, of, phase, 1)}) == 2
    assert _committed(stack) == [(1, 1), (2, 1)]
    assert stack.final_aggregate() == undisturbed
    if by is signal.SIGSTOP:
        died = [(event["exit_code"], event["reason"]) for event in stack.events(of) if event["event"] == "trainer_died"]
        assert died == [(-signal.SIGKILL, f"no progress for {STALL_S:.0f} s")]


@pytest.mark.slow
def test_a_killed_agent_and_then_a_killed_coordinator_resume_the_same_attempt_and_the_result_is_the_same(
    stack: Stack, undisturbed: str
) -> None:
    progress = stack.wait_event(VICTIM, _under_way, "training is under way")
    stack.kill(VICTIM)
    wait_for(lambda: not Path(f"/proc/{progress['pid']}").exists(), "the trainer dies with its agent", 10)
    assert _committed(stack) == []
    stack.start_agent(VICTIM)
    stack.wait_event("coordinator", _distilling, "distillation is under way")
    assert len({event["pid"] for event in _entries(stack, VICTIM, "classify", 1)}) == 2
    stack.kill("coordinator")
    stack.start_coordinator()
    stack.wait_finished()
    entered = _entries(stack, "coordinator", "distil", 1)
    assert len({event["pid"] for event in entered}) == 2
    assert {event["attempt"] for event in entered} == {1}
    assert _committed(stack) == [(1, 1), (2, 1)]
    assert stack.final_aggregate() == undisturbed


@pytest.mark.slow
def test_a_broker_killed_while_boxes_train_and_again_while_they_deliver_changes_nothing(
    stack: Stack, undisturbed: str
) -> None:
    stack.wait_event(VICTIM, _under_way, "training is under way")
    _kill_broker(stack)
    stack.wait_event("coordinator", lambda event: event["event"] == "update_stored", "the first update is there")
    _kill_broker(stack)
    stack.wait_finished()
    stored = [
        (event["client"], event["round"], event["attempt"])
        for event in stack.events("coordinator")
        if event["event"] == "update_stored"
    ]
    assert sorted(stored) == sorted((device, round_number, 1) for device in stack.devices for round_number in (1, 2))
    assert _committed(stack) == [(1, 1), (2, 1)]
    assert stack.final_aggregate() == undisturbed


def _kill_broker(stack: Stack) -> None:
    """SIGKILL the broker and the process that watches it, and start it anew at once."""
    process = stack.running.pop("broker")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    stack.start_broker()
