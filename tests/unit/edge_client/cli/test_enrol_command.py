"""`fedcg enrol` and `fedcg agent renew` as a person at the box uses them: where the token comes from, what is told, exit codes."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import Result

from edge_client.config import load_config
from fedcg.errors import NOT_FOUND
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.enrolments import Desk, open_home, running_desk


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with running_desk(open_home(tmp_path / "home")) as running:
        yield running


def enrol(*arguments: object, typed: str = "", environment: dict[str, str] | None = None) -> Result:
    return run_fedcg("enrol", *arguments, typed=typed, environment=environment)


def test_the_token_comes_from_standard_input_and_is_not_repeated_to_anybody(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4").text
    (tmp_path / "images").mkdir()
    done = enrol("--token", "-", "--out", tmp_path / "box", "--data", tmp_path / "images", typed=f"{token}\n")
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
    done = enrol(
        "--out",
        tmp_path / "box",
        "--device",
        "line-5",
        "--data",
        "dataset:parts",
        "--json",
        environment={"FEDCG_TOKEN": desk.token().text},
    )
    assert done.exit_code == 0, done.output
    told = data_of(done.stdout)
    assert (told["device"], told["config"]) == ("line-5", str(tmp_path / "box" / "agent.toml"))
    assert told["certificate_expires"].startswith("20")
    assert load_config(tmp_path / "box" / "agent.toml", {}).data.root.name == "dataset:parts"


def test_a_data_folder_that_is_not_there_is_refused_before_the_token_is_used(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("a").text
    refused = enrol("--token", token, "--out", tmp_path / "box", "--data", tmp_path / "imgaes")
    assert refused.exit_code == NOT_FOUND
    assert "imgaes: there is no such file or folder. The token was not used" in refused.stderr
    assert refused.exit_code == NOT_FOUND
    for words in (("enrol",), ("agent", "join")):
        told = " ".join(re.sub(r"[│╭╮╰╯─]", " ", run_fedcg(*words, "--help").stdout).split())
        assert re.search(rf"Exit codes: .*; {NOT_FOUND} --data (or agent.toml )?is not there", told), told
    assert not (tmp_path / "box").exists()
    (tmp_path / "images").mkdir()
    assert enrol("--token", token, "--out", tmp_path / "box", "--data", tmp_path / "images").exit_code == 0


SHIFTED = "import time; now = time.time; time.time = lambda: now() + {}; from fedcg.cli import main; main()"


@pytest.mark.parametrize(("days", "how"), [(400, "(399|400) days.* ahead of"), (-400, "(399|400) days.* behind")])
def test_a_box_whose_clock_is_wrong_is_told_by_how_much_and_keeps_its_token(
    desk: Desk, tmp_path: Path, days: int, how: str
) -> None:
    token, out = desk.token("line-4").text, tmp_path / "box"
    command = [sys.executable, "-c", SHIFTED.format(days * 86_400), "enrol", "--token", token, "--out", str(out)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert re.search(f"this box's clock is {how} the coordinator's", refused.stderr)
    assert refused.stderr.count(" UTC") == 2
    assert "(timedatectl set-ntp true), then enrol again" in refused.stderr
    assert not out.exists()
    assert enrol("--token", token, "--out", out).exit_code == 0


def test_images_named_from_here_are_found_from_anywhere(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pictures").mkdir()
    assert enrol("--token", desk.token("a").text, "--out", "box", "--data", "pictures").exit_code == 0
    assert load_config(tmp_path / "box" / "agent.toml", {}).data.root == tmp_path / "pictures"
    done = enrol("--token", desk.token("b").text, "--out", "other")
    assert "Set [data] root" in done.stdout
    assert load_config(tmp_path / "other" / "agent.toml", {}).data.root == tmp_path / "other" / "data"


def test_a_damaged_token_is_bad_input_and_a_refusal_has_its_own_exit_code(desk: Desk, tmp_path: Path) -> None:
    token = desk.token("line-4")
    damaged = enrol("--token", token.text[:-3], "--out", tmp_path / "box")
    assert damaged.exit_code == 2
    assert "cut off or mistyped" in damaged.stderr
    assert not (tmp_path / "box").exists()
    assert enrol("--token", token.text, "--out", tmp_path / "box").exit_code == 0
    refused = enrol("--token", token.text, "--out", tmp_path / "other")
    assert refused.exit_code == 4
    assert "used already" in refused.stderr
    assert token.secret.hex() not in refused.output
    unnamed = enrol("--token", desk.token().text, "--out", tmp_path / "third")
    assert unnamed.exit_code == 2
    assert "--device ID" in unnamed.stderr
    bound = desk.token("line-5").text
    for wrong, named in (
        (("--device", "line-6"), "--device line-6: the token is for device 'line-5' only"),
        (("--device", "Line 5"), "--device"),
        (("--url", "https://127.0.0.1:99999"), "--url https://127.0.0.1:99999"),
        (("--url", "http://127.0.0.1"), "--url http://127.0.0.1: write https://HOST:PORT"),
    ):
        refused = enrol("--token", bound, "--out", tmp_path / "fourth", *wrong)
        assert (refused.exit_code, named in refused.stderr) == (2, True), refused.stderr
    foreign = enrol("--token", bound, "--out", tmp_path)
    assert (foreign.exit_code, "holds other things" in foreign.stderr) == (6, True)


def test_renewing_by_hand_says_until_when_and_a_refusal_is_a_failure(desk: Desk, tmp_path: Path) -> None:
    enrol("--token", desk.token("line-4").text, "--out", tmp_path / "box")
    config = str(tmp_path / "box" / "agent.toml")
    done = run_fedcg("agent", "renew", "--config", config, "--json")
    assert done.exit_code == 0, done.output
    assert data_of(done.stdout)["device"] == "line-4"
    assert "is valid until" in run_fedcg("agent", "renew", "--config", config).stdout
    (tmp_path / "box" / "tls" / "device.key").unlink()
    broken = run_fedcg("agent", "renew", "--config", config)
    assert broken.exit_code == 2
    assert "device.key" in broken.stderr
    assert run_fedcg("agent", "renew", "--config", tmp_path / "nothing.toml").exit_code == NOT_FOUND


def clock_line(config: Path) -> tuple[str, str, str]:
    (found,) = (
        one
        for one in data_of(run_fedcg("doctor", "--config", config, "--json").stdout)["findings"]
        if one["check"] == "clock"
    )
    return found["state"], found["detail"], found["advice"]


def test_the_doctor_compares_the_clock_with_the_coordinators_as_enrol_does(tmp_path: Path) -> None:
    config = tmp_path / "box" / "agent.toml"
    with running_desk(open_home(tmp_path / "home")) as desk:
        assert enrol("--token", desk.token("line-4").text, "--out", config.parent).exit_code == 0
        assert clock_line(config)[0] == "ok"
        assert clock_line(config)[1].endswith(", as the coordinator's")
        for ahead_s, state, how in ((-7200, "failed", "2:00:0. ahead of"), (300, "warning", "0:0[45]:.. behind")):
            desk.ahead_s = ahead_s
            found = clock_line(config)
            assert found[0] == state
            assert re.search(f"this box's clock is {how} the coordinator's: it shows .* UTC", found[1])
            assert "timedatectl" in found[2]
    state, detail, _ = clock_line(config)
    assert state == "warning"
    assert "not compared with the coordinator's: no answer from https://" in detail
