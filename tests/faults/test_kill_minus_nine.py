"""Processes of a federation at work are killed or stopped while their phase is demonstrably under way, started elsewhere, or outlive their certificates.

The final aggregate must be that of an undisturbed run, and no update may be lost.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from coordinator.storage.database import PASSWORD_VARIABLE
from fedcg.wire.messages.enrolment_messages import load_certificate
from tests.support.edge.toml_edit import set_values
from tests.support.object_store import running_moto
from tests.support.postgres import PASSWORD, Cluster
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]

# Small enough for seconds, long enough that a phase can be caught in the middle.
PARAMS = {"epochs": 4, "server_iterations": 600, "server_batch": 16, "ramp_rounds": 2}
VICTIM = "site-2"
STALL_S = 6.0


def _stack(root: Path) -> Stack:
    return Stack(root=root, params=PARAMS, rounds=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The sha256 of the final aggregate of a run that nobody disturbs."""
    with _stack(tmp_path_factory.mktemp("undisturbed")).up(agents=True) as stack:
        stack.wait_finished()
        return stack.final_aggregate()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    made = _stack(tmp_path)
    made.prepare()
    set_values(made.config(VICTIM), {("training", "stall_s"): STALL_S})
    with made.up(agents=True):
        yield made


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


@pytest.mark.parametrize("case", REPLACED)
def test_a_process_that_is_killed_or_hangs_is_replaced_and_the_result_is_the_same(
    stack: Stack, undisturbed: str, case: str
) -> None:
    of, is_under_way, by, phase = REPLACED[case]
    os.kill(stack.wait_event(of, is_under_way, f"the {phase} phase is under way")["pid"], by)
    stack.wait_finished()
    assert len({event["pid"] for event in _entries(stack, of, phase, 1)}) == 2
    assert _committed(stack) == [(1, 1), (2, 1)]
    assert stack.final_aggregate() == undisturbed
    if by is signal.SIGSTOP:
        died = [(event["exit_code"], event["reason"]) for event in stack.events(of) if event["event"] == "trainer_died"]
        assert died == [(-signal.SIGKILL, f"no progress for {STALL_S:.0f} s")]


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


def test_a_broker_killed_while_boxes_train_and_deliver_changes_nothing(stack: Stack, undisturbed: str) -> None:
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


CONFIGURATION = ("coordinator.toml", "signing.key", "coordinator.secret", "pki")


@pytest.fixture
def stateless(tmp_path: Path, postgres: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A federation at work whose coordinator keeps its state in PostgreSQL and S3."""
    monkeypatch.setenv(PASSWORD_VARIABLE, PASSWORD)
    database = postgres.make_database().set(password=None).render_as_string()
    with running_moto(monkeypatch) as moto:
        made = Stack(tmp_path, params=PARAMS, storage={"database": database, "artifacts": moto.url})
        with made.up(agents=True):
            yield made


def is_stored(event: dict[str, object]) -> bool:
    return event["event"] == "update_stored"


def test_a_killed_coordinator_started_from_configuration_and_keys_alone_resumes_the_round(stateless: Stack) -> None:
    """With PostgreSQL and S3 the coordinator's process and directory hold no state of a round. In short: test_artifacts, test_database."""
    stack = stateless
    stack.wait_event("coordinator", is_stored, "a first update is stored")
    stack.kill("coordinator")
    killed_at = time.time()
    before = stack.events("coordinator")
    first = stack.home
    stack.home_name = "elsewhere"
    stack.home.mkdir()
    for name in CONFIGURATION:
        copy = shutil.copytree if (first / name).is_dir() else shutil.copy2
        copy(first / name, stack.home / name)
    stack.start_coordinator()
    stored = stack.wait_event("coordinator", is_stored, "the next update is stored")
    # with pytest -s
    sys.stdout.write(f"seconds from SIGKILL to the next accepted update: {stored['t'] - killed_at:.1f}\n")
    stack.wait_finished()
    after = stack.events("coordinator")
    resumed = next(event for event in after if event["event"] == "attempt_resumed")
    earlier = sorted(str(event["client"]) for event in before if is_stored(event))
    assert (resumed["round"], resumed["attempt"]) == (1, 1)
    assert sorted(resumed["stored"]) == earlier  # nothing that was accepted is lost
    later = [event["client"] for event in after if is_stored(event) and event["round"] == 1]
    assert sorted([*earlier, *later]) == sorted(stack.devices)
    assert [event for event in before + after if event["event"] == "attempt_failed"] == []


LIFE_S = 30.0
OF_SECONDS = {"epochs": 6, "server_iterations": 60, "server_batch": 16, "ramp_rounds": 2}


@pytest.fixture
def young(tmp_path: Path) -> Iterator[Stack]:
    """A coordinator whose certificates for devices live half a minute."""
    made = Stack(tmp_path, ("site-1", "site-2"), params=OF_SECONDS, enrol=True, certificate_days=LIFE_S / 86_400)
    with made.up():
        yield made


def certificate_end(stack: Stack, device: str) -> float:
    path = stack.config(device).parent / "tls" / "device.pem"
    return load_certificate(path.read_bytes()).not_valid_after_utc.timestamp()


def open_rounds(stack: Stack) -> list[tuple[float, float]]:
    """From when to when each round collected updates."""
    events = stack.events("coordinator")
    begun, ended = (
        [event["t"] for event in events if event["event"] == name] for name in ("attempt_opened", "distilling")
    )
    return list(zip(begun, ended, strict=True))


def is_renewal(event: dict[str, Any], *, after: float) -> bool:
    return bool(event["event"] == "certificate_renewed" and event["t"] > after)


def test_rounds_survive_renewals_and_the_end_of_the_first_certificates(young: Stack) -> None:
    """One box runs alone first, so the round can't open before its certificate is of the second generation."""
    stack = young
    stack.enrol_device("site-1")
    first_end = certificate_end(stack, "site-1")
    stack.start_agent("site-1")
    stack.wait_event("site-1", lambda event: event["event"] == "welcomed", "it is welcomed")
    wait_for(lambda: time.time() > first_end, "its first certificate expires", LIFE_S + 30)
    assert any(event["event"] == "certificate_renewed" for event in stack.events("site-1"))
    assert certificate_end(stack, "site-1") > first_end
    links = [event["up"] for event in stack.events("site-1") if event["event"] == "link"]
    assert links[:3] == [True, False, True]

    stack.kill("broker")
    (stack.root / "broker.log").unlink()
    stack.start_broker()
    stack.enrol_device("site-2")
    stack.start_agent("site-2")
    training = stack.wait_event("site-2", lambda event: event["event"] == "phase_started", "site-2 trains")
    os.kill(training["pid"], signal.SIGSTOP)  # the round stays open until both boxes have renewed
    try:
        for device in stack.devices:
            stack.wait_event(device, partial(is_renewal, after=training["t"]), f"{device} renews", LIFE_S + 30)
    finally:
        os.kill(training["pid"], signal.SIGCONT)
    stack.wait_finished()
    opened, closed_at = open_rounds(stack)[0]
    for device in stack.devices:
        within = [event for event in stack.events(device) if is_renewal(event, after=opened) and event["t"] < closed_at]
        assert within, f"{device} renewed while the round was open"
    closed = [event["clients"] for event in stack.events("coordinator") if event["event"] == "distilling"]
    assert closed == [["site-1", "site-2"]] * 2
    assert not any(event["event"] == "attempt_failed" for event in stack.events("coordinator"))
