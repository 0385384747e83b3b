"""`fedcg enrol`, `fedcg agent renew` and `fedcg agent join` as a person at the box uses them: the token, the second federation, exit codes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

from coordinator.paths import Home
from edge_client.config import AgentConfig, load_config
from edge_client.identity.credentials import load_keys
from edge_client.identity.enrol import enrol
from edge_client.store.private_store import PrivateStore
from fedcg.config_file import set_values
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.learning.program import Program
from fedcg.wire.messages.envelopes import PinnedKey, SigningKey
from fedcg.wire.parts import Part
from tests.support.commands import data_of, fails, run_fedcg, succeeds
from tests.support.coordinator.enrolments import FEDERATION, Desk, running_desk


@pytest.fixture
def first(home: Home, tmp_path: Path) -> Path:
    """The agent.toml of an enrolled device that may upload its classifier only."""
    with running_desk(home) as desk:
        enrol(desk.token("line-4"), tmp_path / "box")
    (tmp_path / "images").mkdir()
    path = tmp_path / "box" / "agent.toml"
    settings: dict[tuple[str, str], str | bool | float | list[str]] = {("policy", "allow_upload"): ["classifier"]}
    settings |= {("eligibility", "stop_file"): "stop"}
    settings |= {("audit", "before_publish"): "quick", ("audit", "auxiliary"): "aux", ("privacy", "prune"): 0.5}
    path.write_text(set_values(path.read_text(), settings))
    return path


def joined(first: Path) -> AgentConfig:
    """The configuration of the second federation, once the device has joined it."""
    root = first.parent.parent
    named = ("--config", first, "--federation", "second", "--data", root / "images")
    done = succeeds("agent", "join", *named, "--out", root / "second")
    assert "fedcg doctor checks whether the coordinator has second" in done
    return load_config(root / "second" / "agent.toml", {})


def test_the_second_federation_has_a_store_of_its_own_and_the_identity_and_policy_of_the_first(first: Path) -> None:
    one, two = load_config(first, {}), joined(first)
    assert (two.federation, two.device) == ("second", one.device)
    assert (two.tls, two.keys, two.policy, two.broker) == (one.tls, one.keys, one.policy, one.broker)
    assert two.policy.allow_upload == frozenset({Part.CLASSIFIER})
    assert (two.audit, two.privacy) == (one.audit, one.privacy)
    assert (two.audit.is_on, two.privacy.prune) == (True, 0.5)
    assert two.eligibility == one.eligibility
    assert two.eligibility.stop_file is not None
    assert two.training_lock == one.training_lock
    assert two.store != one.store
    assert two.data.root == first.parent.parent / "images"
    assert load_keys(two).signing.public == load_keys(one).signing.public
    assert not list((first.parent.parent / "second").rglob("*.key"))
    PrivateStore.open(two.store, "second", one.device)


def test_a_key_of_the_coordinator_that_was_replaced_is_not_trusted_again_in_the_second_federation(first: Path) -> None:
    one = load_config(first, {})
    enrolled, followed = load_keys(one).coordinator, PinnedKey(SigningKey.generate().public, 1)
    PrivateStore.open(one.store, one.federation, one.device).save_pinned_key(enrolled, followed)
    assert PrivateStore(joined(first).store).pinned_key(enrolled) == followed


@pytest.mark.parametrize(
    ("change", "ends", "why"),
    [
        ({"federation": "Second!"}, BAD_INPUT, "lowercase letters, digits and dashes"),
        ({"federation": FEDERATION}, BAD_INPUT, "is already in it"),
        ({"out": "box"}, EXISTS, "is not empty"),
        ({"data": "nowhere"}, NOT_FOUND, "no such file or folder"),
        ({"program": "client:client"}, BAD_INPUT, "and omit --data"),
    ],
)
def test_a_second_federation_that_can_not_be_is_refused_and_nothing_is_written(
    first: Path, change: dict[str, str], ends: int, why: str
) -> None:
    root = first.parent.parent
    words = ["--config", first, "--federation", change.get("federation", "second")]
    words += ["--out", root / change.get("out", "second"), "--data", root / change.get("data", "images")]
    words += ["--program", change["program"]] if "program" in change else []
    assert why in fails(ends, "agent", "join", *words)
    assert not (root / "second").exists()


def test_a_second_federation_trains_a_program_of_its_own_or_images_where_the_first_has_a_program(first: Path) -> None:
    root, named = first.parent.parent, ("--config", first, "--federation", "second", "--out")
    assert "give --data, or --program" in fails(BAD_INPUT, "agent", "join", *named, root / "none")
    assert "give MODULE:FUNCTION" in fails(BAD_INPUT, "agent", "join", *named, root / "none", "--program", "a b")
    succeeds("agent", "join", *named, root / "second", "--program", "client:client")
    assert Program.of_source(load_config(root / "second" / "agent.toml", {}).data.root) == Program(
        "client:client", root / "second"
    )
    first.write_text(set_values(first.read_text(), {("training", "program"): "client:client"}))
    succeeds("agent", "join", *named, root / "third", "--data", root / "images")
    assert load_config(root / "third" / "agent.toml", {}).data.root == root / "images"


def run_enrol(*arguments: object, typed: str = "", environment: dict[str, str] | None = None) -> Result:
    return run_fedcg("enrol", *arguments, typed=typed, environment=environment)


def test_the_token_comes_from_standard_input_and_is_not_repeated_to_anybody(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4").text
    (tmp_path / "images").mkdir()
    done = run_enrol("--token", "-", "--out", tmp_path / "box", "--data", tmp_path / "images", typed=f"{token}\n")
    assert done.exit_code == 0, done.output
    assert done.stdout.index("fedcg cohort join --config") < done.stdout.index("fedcg agent run --config")
    assert "fedcg doctor --config" in done.stdout
    assert token not in done.output
    config = tmp_path / "box" / "agent.toml"
    sent = run_fedcg("agent", "sent", "--config", config).stdout
    assert sent.startswith("No update and no report has left this device.\nNot listed: enrolment and renewals (token, ")
    assert "enrolment" in data_of(run_fedcg("agent", "sent", "--config", config, "--json").stdout)["not_listed"]
    assert token.encode() not in b"".join(path.read_bytes() for path in (tmp_path / "box").rglob("*") if path.is_file())


def test_the_token_comes_from_the_environment_and_the_result_is_json(desk: Desk, tmp_path: Path) -> None:
    words = ("--out", tmp_path / "box", "--device", "line-5", "--program", "client:client", "--json")
    done = run_enrol(*words, environment={"FEDCG_TOKEN": desk.token().text})
    assert done.exit_code == 0, done.output
    told = data_of(done.stdout)
    assert (told["device"], told["config"]) == ("line-5", str(tmp_path / "box" / "agent.toml"))
    assert told["certificate_expires"].startswith("20")
    assert Program.of_source(load_config(tmp_path / "box" / "agent.toml", {}).data.root) == Program(
        "client:client", tmp_path / "box"
    )


def test_a_data_folder_that_is_not_there_is_refused_before_the_token_is_used(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("a").text
    refused = fails(NOT_FOUND, "enrol", "--token", token, "--out", tmp_path / "box", "--data", tmp_path / "imgaes")
    assert "imgaes: no such file or folder. The token was not used" in refused
    for words in (("enrol",), ("agent", "join")):
        told = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run_fedcg(*words, "--help").stdout).split())
        assert re.search(rf"Exit codes: .*; {NOT_FOUND} --data (or agent.toml )?not found", told), told
    assert not (tmp_path / "box").exists()
    (tmp_path / "images").mkdir()
    assert run_enrol("--token", token, "--out", tmp_path / "box", "--data", tmp_path / "images").exit_code == 0


SHIFTED = "import time; now = time.time; time.time = lambda: now() + {}; from fedcg.cli import main; main()"


@pytest.mark.parametrize(("days", "how"), [(400, "(399|400) days.* ahead of"), (-400, "(399|400) days.* behind")])
def test_a_box_whose_clock_is_wrong_is_told_by_how_much_and_keeps_its_token(
    desk: Desk, tmp_path: Path, days: int, how: str
) -> None:
    token, out = desk.token("line-4").text, tmp_path / "box"
    command = [sys.executable, "-c", SHIFTED.format(days * 86_400), "enrol", "--token", token, "--out", str(out)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert re.search(f"this device's clock is {how} the coordinator's", refused.stderr)
    assert refused.stderr.count(" UTC") == 2
    assert "(timedatectl set-ntp true), then enrol again" in refused.stderr
    assert not out.exists()
    assert run_enrol("--token", token, "--out", out).exit_code == 0


def test_images_named_here_are_found_from_anywhere(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    assert run_enrol("--token", desk.token("a").text, "--out", "box", "--data", "pictures").exit_code == 0
    assert load_config(tmp_path / "box" / "agent.toml", {}).data.root == tmp_path / "pictures"
    assert "Set [data] root" in run_enrol("--token", desk.token("b").text, "--out", "other").stdout
    assert load_config(tmp_path / "other" / "agent.toml", {}).data.root == tmp_path / "other" / "data"


def refusal(code: int, out: Path, token: str, *words: str) -> str:
    return fails(code, "enrol", "--token", token, "--out", out, *words)


def test_a_damaged_token_is_bad_input_and_a_refusal_has_its_own_exit_code(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4")
    assert "cut off or mistyped" in refusal(2, tmp_path / "box", token.text[:-3])
    assert not (tmp_path / "box").exists()
    assert run_enrol("--token", token.text, "--out", tmp_path / "box").exit_code == 0
    used = refusal(4, tmp_path / "other", token.text)
    assert "already used" in used
    assert token.secret.hex() not in used
    assert "--device ID" in refusal(2, tmp_path / "third", desk.token().text)
    bound = desk.token("line-5").text
    for wrong, named in (
        (("--device", "line-6"), "--device line-6: the token is for device 'line-5' only"),
        (("--device", "Line 5"), "--device"),
        (("--url", "https://127.0.0.1:99999"), "--url https://127.0.0.1:99999"),
        (("--url", "http://127.0.0.1"), "--url http://127.0.0.1: write https://HOST:PORT"),
    ):
        assert named in refusal(2, tmp_path / "fourth", bound, *wrong)
    assert "contains other files" in refusal(6, tmp_path, bound)


def test_renewing_by_hand_says_until_when_and_a_refusal_is_a_failure(desk: Desk, tmp_path: Path) -> None:
    run_enrol("--token", desk.token("line-4").text, "--out", tmp_path / "box")
    config = str(tmp_path / "box" / "agent.toml")
    assert data_of(run_fedcg("agent", "renew", "--config", config, "--json").stdout)["device"] == "line-4"
    assert "is valid until" in run_fedcg("agent", "renew", "--config", config).stdout
    (tmp_path / "box" / "tls" / "device.key").unlink()
    assert "device.key" in fails(2, "agent", "renew", "--config", config)
    fails(NOT_FOUND, "agent", "renew", "--config", tmp_path / "nothing.toml")
