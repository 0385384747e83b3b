"""A cohort over a real broker whose box is put back from a backup, and whose secret is renewed: rounds go on, and no box's numbers are in a sum that they must not be in."""

import shutil
from pathlib import Path

import pytest

from edge_client.store.private_store import PrivateStore
from fedcg.files import is_locked
from tests.support.commands import data_of, run_fedcg
from tests.support.stack import Stack, wait_for

pytestmark = [pytest.mark.broker, pytest.mark.slow, pytest.mark.timeout(280)]
DEVICES = tuple(f"site-{number}" for number in range(1, 6))
FIRST, OTHERS = DEVICES[0], DEVICES[1:]


def opened(stack: Stack) -> dict[int, list[str]]:
    """The devices in the sum of each round that has one."""
    found = (event for event in stack.events("coordinator") if event["event"] == "sum_opened")
    return {event["round"]: sorted(event["clients"]) for event in found}


def await_sum(stack: Stack, number: int) -> None:
    wait_for(lambda: number in opened(stack), f"the sum of round {number} is opened")


def test_a_restored_box_is_in_no_sum_until_its_owner_resumes_them_and_a_new_secret_seals_later(tmp_path: Path) -> None:
    uploads = dict.fromkeys(DEVICES, ("classifier", "sealed"))
    stack = Stack(
        tmp_path, DEVICES, "fedavg", params={"epochs": 4}, rounds=5, allow_upload=uploads, sealed=("extractor",)
    )
    stack.prepare()
    at = {device: ("--config", str(stack.config(device))) for device in DEVICES}
    roster, passphrase, backup = (tmp_path / name for name in ("roster.txt", "passphrase", "backup"))
    roster.write_text("".join(stack.command("cohort", "card", *at[device]) for device in DEVICES))
    marks = {data_of(stack.command("cohort", "roster", str(roster), *at[name], "--json"))["mark"] for name in DEVICES}
    assert len(marks) == 1
    passphrase.write_text("correct horse battery")
    secret = ("--passphrase-file", str(passphrase))
    with stack.up(agents=True):
        await_sum(stack, 1)
        stack.kill(FIRST)
        wait_for(lambda: not is_locked(stack.store(FIRST) / "trainer.lock"), "the end of its training process")
        stack.command("agent", "backup", "--out", str(backup), *at[FIRST], *secret)
        stack.start_agent(FIRST)
        await_sum(stack, 2)
        stack.kill(FIRST)
        shutil.move(stack.store(FIRST), tmp_path / "lost")
        assert "cohort resume-sums ROUND" in stack.command("agent", "restore", str(backup), *at[FIRST], *secret)
        stack.start_agent(FIRST)
        blocked = stack.wait_event(FIRST, lambda one: one["event"] == "sum_off", "no sum after the restore")
        assert "`fedcg cohort resume-sums ROUND`" in blocked["reason"]
        stack.wait_event("coordinator", lambda one: (one.get("client"), one.get("reason")) == (FIRST, "blocked"), "why")
        last = blocked["round"]
        stack.wait_event(FIRST, lambda one: one["event"] == "receipt" and one["round"] == last, f"round {last}")
        await_sum(stack, last)
        for device in DEVICES:  # as a person stops agents
            stack.running[device].terminate()
        for device in DEVICES:
            stack.running.pop(device).wait(timeout=20)
        assert opened(stack)[1] == list(DEVICES)
        assert opened(stack)[last] == list(OTHERS), "the round went on, with its update and without its sealed part"

        code = data_of(stack.command("cohort", "renew", *at[OTHERS[0]], "--yes", "--json"))["code"]
        (tmp_path / "code").write_text(code)
        for device in (FIRST, *OTHERS[1:]):
            stack.command("cohort", "join", "--replace", "--yes", "--code-file", str(tmp_path / "code"), *at[device])
        assert run_fedcg("doctor", *at[FIRST]).stdout.count("fedcg cohort resume-sums ROUND") >= 1
        known = [
            data_of(stack.command("cohort", "status", *at[device], "--json"))["last_sum_round"] for device in OTHERS
        ]
        stack.command("cohort", "resume-sums", str(max(known)), *at[FIRST])
        first = {PrivateStore(stack.store(device)).sum_gate.first_round for device in DEVICES}
        for device in DEVICES:
            stack.start_agent(device)
        stack.wait_finished()
    refused = [str(event["detail"]) for name in DEVICES for event in stack.events(name) if event["event"] == "refused"]
    assert not any("another secret" in text for text in refused), "the last sum under the secret before is opened too"
    later = {number: devices for number, devices in opened(stack).items() if number > last}
    assert later
    assert min(later) >= min(one for one in first if one is not None)
    assert set(map(tuple, later.values())) == {DEVICES}
