"""A demo's processes: output in logs, failures named with their last lines, and no process left behind."""

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.demo.processes import children
from experiments.errors import ProcessError
from tests.support.waiting import wait_until

SLEEPER = "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', p.pid, flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_child_and_its_own_child_are_gone_when_the_block_is_left(tmp_path: Path) -> None:
    async def go() -> tuple[int, int]:
        async with children(tmp_path) as started:
            child = started.fork("sleeper", SLEEPER, target=exec)
            grandchild = int((await started.line(child, "up", 10))[0].split()[1])
            assert is_alive(grandchild)
            return child.pid, grandchild

    child, grandchild = asyncio.run(go())
    wait_until(lambda: not is_alive(child) and not is_alive(grandchild), "both processes are gone")


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.demo.processes.STOP_S", 0.3)

    async def go() -> int:
        async with children(tmp_path) as started:
            child = started.fork("stubborn", STUBBORN, target=exec)
            await started.line(child, "up", 10)
        assert child.process.exitcode == -signal.SIGKILL
        return child.pid

    assert not is_alive(asyncio.run(go()))


def test_children_are_gone_after_an_error_too(tmp_path: Path) -> None:
    pids: list[int] = []

    async def go() -> None:
        async with children(tmp_path) as started:
            pids.append(started.fork("sleeper", SLEEPER, target=exec).pid)
            last = started.fork("failing", "print('my last words'); raise SystemExit(3)", target=exec)
            await started.line(last, "ready", 10)

    with pytest.raises(ProcessError, match=r"failing exited with code 3(.|\n)*my last words"):
        asyncio.run(go())
    assert not is_alive(pids[0])


def test_a_child_that_never_prints_its_line_is_an_error(tmp_path: Path) -> None:
    async def go() -> None:
        async with children(tmp_path) as started:
            child = started.fork("silent", "import time; time.sleep(600)", target=exec)
            await started.line(child, "ready", 0.2)

    with pytest.raises(ProcessError, match="did not print 'ready'"):
        asyncio.run(go())


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["Ctrl-C", "SIGTERM", "SIGKILL"]
)
def test_no_process_is_left_when_the_parent_is_ended_by(number: signal.Signals, tmp_path: Path) -> None:
    parent_code = f"""
import asyncio, sys
from pathlib import Path
from experiments.demo.processes import children
async def go():
    async with children(Path({str(tmp_path)!r})) as started:
        observe = ("audit", "observe", "--federation", "f", "--out", {str(tmp_path / "seen")!r}, "--host", "127.0.0.1", "--port", "1")
        child = started.fork("observer", *observe)
        print(child.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(go())
"""
    with subprocess.Popen(
        [sys.executable, "-c", parent_code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert is_alive(child)
        parent.send_signal(number)
        parent.wait(15)
    wait_until(lambda: not is_alive(child), "the child is gone")
