"""The cohort's secret: its code, where it is kept, what a device shows of it, and the commands that carry it."""

import re
import stat
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.messaging.incoming import Cohorts
from edge_client.config import load_config
from edge_client.errors import CohortError, StoreError
from edge_client.store.cohort_secret import code_of, create, join, mark_of, roster_of, secret_of
from edge_client.store.private_store import PrivateStore
from fedcg.cli import app
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.sentences import sentence_of
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import CohortVerdict, Hello, RoundAttempt
from tests.support.commands import data_of
from tests.support.edge.world import DEVICE, FEDERATION, MakeWorld, toy_generation, toy_spec, write_device

SECRETS = st.binary(min_size=32, max_size=32)


def open_store(folder: Path, device: str = "site-1") -> PrivateStore:
    return PrivateStore.open(folder / device, FEDERATION, device)


@given(SECRETS)
def test_a_code_gives_its_secret_back_however_it_is_written(secret: bytes) -> None:
    code = code_of(secret)
    assert secret_of(code) == secret
    assert secret_of(f" {code.lower().replace('-', ' ')}\n") == secret
    assert secret_of(code.replace("O", "0").replace("I", "1").replace("B", "8")) == secret
    assert len(code.split("-")) == 14


@given(SECRETS, st.integers(0, 55), st.sampled_from("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"))
def test_a_mistyped_letter_is_noticed(secret: bytes, place: int, letter: str) -> None:
    letters = code_of(secret).replace("-", "")
    wrong = letters[:place] + letter + letters[place + 1 :]
    if wrong != letters:
        with pytest.raises(CohortError, match="checksum is wrong"):
            secret_of(wrong)


def test_a_mark_is_equal_for_equal_secrets_of_a_federation_alone() -> None:
    first, other = bytes(32), bytes(31) + b"\1"
    assert mark_of(first, "shapes") == mark_of(first, "shapes")
    assert len({mark_of(first, "shapes"), mark_of(other, "shapes"), mark_of(first, "herbs")}) == 3


def test_the_secret_is_its_owners_alone_and_is_never_replaced(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path, "site-2")
    code = create(first)
    assert join(second, code)
    assert first.cohort_secret() == second.cohort_secret() == secret_of(code)
    for store in (first, second):
        assert stat.S_IMODE((store.root / "secrets" / "cohort.key").stat().st_mode) == 0o600
    assert not join(second, code)
    for again in (lambda: create(first), lambda: join(second, code_of(bytes(32)))):
        with pytest.raises(StoreError, match="has a cohort secret already"):
            again()
    assert second.cohort_secret() == secret_of(code)


def test_a_store_whose_private_networks_have_started_takes_no_secret(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.generations.commit(toy_generation(toy_spec(), RoundAttempt(1, 1)))
    with pytest.raises(StoreError, match="have started here without a cohort secret"):
        create(store)
    assert store.cohort_secret() is None


def test_a_box_that_trained_without_the_secret_or_with_another_joins_by_the_commands_of_the_refusal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_device(tmp_path / "box", DEVICE)
    store = PrivateStore.open(load_config(config, {}).store, FEDERATION, DEVICE)
    store.generations.commit(toy_generation(toy_spec(), RoundAttempt(1, 1)))
    for number in range(2):
        code = tmp_path / "code"
        code.write_text(code_of(bytes([number]) * 32))
        join = ("join", "--config", str(config), "--code-file", str(code))
        assert run(*join) in (BAD_INPUT, EXISTS)
        refusal = capsys.readouterr().err.replace("\n", " ")
        command = re.search(r"stop the agent, `(mv [^`]+)`, give this command again, start the agent", refusal)
        assert command is not None, refusal
        subprocess.run(command[1].replace(".before", f".before-{number}").split(), check=True)
        assert run(*join) == 0
        assert "Joined; mark" in capsys.readouterr().out


def test_a_lost_code_is_replaced_by_the_file_of_another_box(tmp_path: Path) -> None:
    first, second = open_store(tmp_path), open_store(tmp_path, "site-2")
    code = create(first)
    (second.root / "secrets" / "cohort.key").write_bytes((first.root / "secrets" / "cohort.key").read_bytes())
    assert second.cohort_secret() == secret_of(code)


def test_devices_without_a_secret_are_alike_and_unlike_one_that_has_it() -> None:
    cohorts = Cohorts()
    cohorts.note("site-1", None)
    assert cohorts.note("site-2", None) == ()
    assert cohorts.verdict("site-1") is CohortVerdict.SAME
    assert cohorts.note("mine", "m") == ("site-1", "site-2")
    assert cohorts.verdict("mine") is CohortVerdict.LACKING
    assert cohorts.verdict("site-1") is CohortVerdict.DIFFERENT
    cohorts.note("like mine", "m")
    assert cohorts.verdict("mine") is CohortVerdict.LACKING
    assert "another device has no cohort secret" in str(sentence_of({"event": "cohort", "others": "lacking"}))
    cohorts.note("site-2", "another")
    assert cohorts.verdict("mine") is CohortVerdict.DIFFERENT


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        app.main(args=["cohort", *arguments], prog_name="fedcg")
    return int(ended.value.code or 0)


def test_the_commands_carry_a_secret_from_the_first_device_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (write_device(tmp_path / name, name) for name in ("first", "second"))
    assert run("status", "--config", str(first)) == NOT_FOUND
    assert (
        f"No cohort secret.\nNext: on the first device fedcg cohort create --config {first}, on"
        in capsys.readouterr().out
    )
    assert run("create", "--config", str(first), "--json") == 0
    made = data_of(capsys.readouterr().out)
    code = tmp_path / "code"
    code.write_text(made["code"] + "\n")
    assert run("join", "--config", str(second), "--code-file", str(code)) == 0
    assert f"Joined; mark {made['mark']}\nNext: fedcg cohort card --config {second}\n" in capsys.readouterr().out
    assert run("status", "--config", str(second), "--json") == 0
    assert data_of(capsys.readouterr().out) == {"mark": made["mark"], "roster": []}
    assert run("create", "--config", str(first)) == EXISTS
    assert "has a cohort secret already" in capsys.readouterr().err
    code.write_text("ABCD")
    assert run("join", "--config", str(second), "--code-file", str(code)) == 2
    assert "this one has 4" in capsys.readouterr().err
    assert run("join", "--config", str(second), "--code-file", str(tmp_path / "nowhere")) == NOT_FOUND
    assert "nowhere" in capsys.readouterr().err


def test_an_agent_sends_its_mark_and_records_when_others_have_another_secret(make_world: MakeWorld) -> None:
    world = make_world()
    secret = secret_of(create(PrivateStore.open(world.config.store, FEDERATION, DEVICE)))
    world.coordinator.cohort = CohortVerdict.DIFFERENT
    world.coordinator.come_online()
    world.start_agent()
    assert world.coordinator.wait(Hello).cohort == mark_of(secret, FEDERATION)
    world.coordinator.work_until(
        lambda: [event["others"] for event in world.events("cohort")] == ["different"], "the other secret is recorded"
    )


def test_a_roster_names_the_line_that_is_no_card() -> None:
    keys = [SigningKey.generate().public for _ in range(2)]
    lines = [f"line-{number} {key.hex}" for number, key in enumerate(keys, 1)]
    assert roster_of("\n".join(["", *lines, ""])) == {"line-1": keys[0], "line-2": keys[1]}
    for bad, problem in (
        (lines[0], "line 3 of the roster: 'line-1' is no device, or there twice"),
        ("Line-3 " + keys[0].hex, "line 3 of the roster: 'Line-3' is no device"),
        ("line-3 " + keys[0].hex[:-1], "line 3 of the roster: not a card of `fedcg cohort card`"),
    ):
        with pytest.raises(CohortError, match=problem):
            roster_of("\n".join([*lines, bad]))
