"""An update that is unlike the others, over a real broker: the device that sent it and the operator get reason, figure and threshold."""

import re
from pathlib import Path

import pytest

from tests.support.commands import data_of
from tests.support.page.pages import Reader
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(200)]
WHY = re.compile(
    r"weighed down: its step is [\d.]+ times as long as the median \(at most 0\.1\); left in because the round needs it"
)


def test_the_sender_is_told_what_became_of_its_update_and_why(tmp_path: Path) -> None:
    stack = Stack(root=tmp_path / "fleet", method="fedavg", params={"epochs": 1}, rounds=1)
    stack.allow_upload = dict.fromkeys(stack.devices, ("classifier", "extractor"))
    stack.prepare()
    config = stack.home / "coordinator.toml"
    strict = re.sub(r"(?m)^norm = .*$", 'norm = { bound = 0.1, action = "quarantine" }', config.read_text())
    config.write_text(strict)  # every step is longer than a tenth of the median, and the round needs all three
    with stack.up(agents=True):
        for device in stack.devices:
            wait_for(lambda: stack.running[device].poll() is not None, stack.tail(device))  # noqa: B023
        for device in stack.devices:
            status = data_of(stack.command("agent", "status", "--config", str(stack.config(device)), "--json"))
            told = re.fullmatch(r"1 of the last 1; round 1\.1: (.*)", status["odd_updates"])
            assert told is not None
            assert WHY.fullmatch(told[1])
            assert told[1] in stack.command("device", "show", device, "--dir", str(stack.home))
            assert f"the update is {told[1]}" in stack.tail(device)
        reader = Reader(stack.api_port).log_in((stack.home / "api.token").read_text().strip())
        assert all(WHY.search(reader.get(path)[1]) for path in ("/f/shapes", f"/devices/{device}", "/repairs"))
