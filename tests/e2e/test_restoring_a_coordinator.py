"""A coordinator goes back to a backup and forward to another one, beside the same broker: boxes follow, and report where they stand."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import data_of
from tests.support.edge.toml_edit import set_values
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(200)]
HEARTBEAT_S = 5
PROMPT_S = 25.0  # a heartbeat, and the restored coordinator's start on a busy machine


def status(stack: Stack, device: str) -> dict[str, Any]:
    return dict(data_of(stack.command("agent", "status", "--config", str(stack.config(device)), "--json")))


def online(stack: Stack) -> list[str]:
    listed = data_of(stack.command("device", "list", "--dir", str(stack.home), "--json"))
    return sorted(device["id"] for device in listed if device["online"])


def test_boxes_report_the_session_that_they_really_have_while_a_coordinator_goes_back_and_forth(tmp_path: Path) -> None:
    stack = Stack(root=tmp_path, devices=("site-1", "site-2"), min_clients=9, enrol=True)  # nothing is learnt
    words = ("--passphrase-file", str(tmp_path / "passphrase"))

    def enrol(device: str, backup: Path) -> None:
        stack.enrol_device(device)
        set_values(stack.config(device), {("broker", "keepalive_s"): HEARTBEAT_S})
        stack.start_agent(device)
        stack.wait_event(device, lambda event: event["event"] == "welcomed", f"{device} is welcomed")
        stack.command("coordinator", "backup", "--out", str(backup), "--dir", str(stack.home), *words)

    def restore(backup: Path, name: str) -> None:
        stack.kill("coordinator")
        stack.home_name = name
        stack.command("coordinator", "restore", str(backup), "--dir", str(stack.home), *words)
        stack.start_coordinator()

    stack.prepare()
    (tmp_path / "passphrase").write_text("correct horse battery\n")
    with stack.up():
        enrol("site-1", tmp_path / "without-site-2")
        enrol("site-2", tmp_path / "with-both")

        restore(tmp_path / "without-site-2", "earlier")
        wait_for(lambda: not status(stack, "site-2")["agent_in_session"], "site-2 is in no session", PROMPT_S)
        wait_for(lambda: online(stack) == ["site-1"], "site-1 follows", PROMPT_S)
        problem = "refused a publish on fedcg/1/shapes/devices/site-2/up/control: Not authorized"
        wait_for(lambda: problem in stack.tail("site-2"), "site-2 logs why", PROMPT_S)

        restore(tmp_path / "with-both", "later")
        wait_for(lambda: online(stack) == ["site-1", "site-2"], "both follow", PROMPT_S)
        for device in stack.devices:
            wait_for(lambda: status(stack, device)["agent_in_session"], f"{device} is in session", PROMPT_S)  # noqa: B023
            assert status(stack, device)["link_problem"] is None
        epochs = [event["epoch"] for event in stack.events("site-1") if event["event"] == "welcomed"]
        assert epochs == sorted(set(epochs)), "each restored coordinator has an epoch above the one before"
        assert stack.tail("site-2").count("refused a publish") == 1
