"""A trainer that is stopped in the middle of a round, and never dies by itself, is replaced; the result is the same."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
PARAMS = {"epochs": 6, "server_iterations": 100, "server_batch": 16, "ramp_rounds": 2}
VICTIM = "site-2"
STALL_S = 6.0


def run(root: Path, *, disturb: bool) -> Stack:
    stack = Stack(root=root, params=PARAMS, rounds=1, devices=("site-1", VICTIM))
    stack.prepare()
    set_values(stack.config(VICTIM), {("training", "stall_s"): STALL_S})
    try:
        stack.start_all()
        if disturb:
            progress = stack.wait_event(VICTIM, is_under_way, "training is under way")
            os.kill(progress["pid"], signal.SIGSTOP)
        stack.wait_finished()
    finally:
        stack.stop()
    return stack


def is_under_way(event: dict[str, Any]) -> bool:
    return bool(event["event"] == "progress" and event["phase"] == "generate" and event["step"] > 0)


def test_a_stopped_trainer_is_killed_with_the_reason_and_the_round_is_trained_again_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    disturbed, undisturbed = run(tmp_path / "disturbed", disturb=True), run(tmp_path / "undisturbed", disturb=False)
    died = [event for event in disturbed.events(VICTIM) if event["event"] == "trainer_died"]
    assert [(event["exit_code"], event["reason"]) for event in died] == [(-signal.SIGKILL, "no progress for 6 s")]
    committed = [event["round"] for event in disturbed.events(VICTIM) if event["event"] == "committed"]
    assert committed == [1]
    assert disturbed.final_aggregate() == undisturbed.final_aggregate()
    assert not [event for event in undisturbed.events(VICTIM) if event["event"] == "trainer_died"]
