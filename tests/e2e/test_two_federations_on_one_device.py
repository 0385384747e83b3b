"""Devices serve two federations at once, by the commands and over a real broker: one identity, two agents, training in turns."""

from itertools import pairwise
from pathlib import Path

import pytest

from fedcg.files import checked_secret
from tests.support.commands import data_of
from tests.support.stack import Stack, write_images

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
SHARED = "site-1"
SECOND = "shapes-b"


class _TwoFederations(Stack):
    """A second federation of the same devices; only the agent of `SHARED` in it is made by `fedcg agent join`."""

    def second(self, device: str) -> str:
        return f"{device}-second"

    def prepare(self) -> None:
        super().prepare()
        plan = self.root / "second.toml"
        plan.write_text(self.plan().replace('federation = "shapes"', f'federation = "{SECOND}"'))
        self.command("federation", "create", "--dir", str(self.home), str(plan))
        for number, device in enumerate(self.devices):
            data = self.root / "data-second" / device
            write_images(data / "train", per_class=16, seed=300 + number)
            write_images(data / "test", per_class=6, seed=400 + number)
            named = ("--config", str(self.config(device)), "--federation", SECOND, "--data", str(data))
            self.command("agent", "join", *named, "--out", str(self.config(self.second(device)).parent))
            secrets = self.store(self.second(device)) / "secrets"
            (secrets / "cohort.key").write_bytes(checked_secret(b"d" * 32))
            (secrets / "cohort.key").chmod(0o600)


def _busy(stack: Stack, name: str) -> list[tuple[float, float]]:
    """From when to when an agent's training process worked."""
    begun, spans = None, []
    for event in stack.events(name):
        if event["event"] == "phase_started" and event["phase"] == "load":
            begun = event["t"]
        elif event["event"] == "committed" and begun is not None:
            spans.append((begun, event["t"]))
            begun = None
    return spans


def test_one_device_serves_two_federations_at_once_and_trains_for_one_at_a_time(tmp_path: Path) -> None:
    stack = _TwoFederations(tmp_path, params={"epochs": 8, "server_iterations": 10}, rounds=2, broker="mosquitto")
    with stack.up():
        for device in stack.devices:
            stack.start_agent(device)
            stack.start_agent(stack.second(device))
        stack.wait_finished(200.0)
        for device in stack.devices:
            assert stack.running[stack.second(device)].wait(timeout=60) == 0, stack.tail(stack.second(device))
        ended = {event["federation"] for event in stack.events("coordinator") if event["event"] == "finished"}
        assert ended == {"shapes", SECOND}
        status = [
            data_of(stack.command("agent", "status", "--config", str(stack.config(name)), "--json"))
            for name in (SHARED, stack.second(SHARED))
        ]
    assert [one["federation"] for one in status] == ["shapes", SECOND]
    assert len({one["model"] for one in status} | {one["device"] for one in status}) == 2
    for device in stack.devices:
        spans = sorted(_busy(stack, device) + _busy(stack, stack.second(device)))
        assert len(spans) == 4
        assert all(earlier[1] <= later[0] + 0.01 for earlier, later in pairwise(spans)), spans
    waited = [
        event
        for device in stack.devices
        for name in (device, stack.second(device))
        for event in stack.events(name)
        if event["event"] == "phase_started" and event["phase"] == "wait"
    ]
    assert waited, "no training process ever had to wait: the test shows nothing"
