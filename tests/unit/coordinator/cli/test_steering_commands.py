"""The commands that steer: through the API of a running coordinator, over the network with a token, and without a coordinator."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.shared_options import store_of
from coordinator.paths import Home
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.text_output import moment
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from tests.support.broker.broker_plant import Plant
from tests.support.commands import data_of, run_fedcg
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION, tiny_spec
from tests.support.waiting import free_port, wait_until

SECOND = """
federation = "second"
classes = ["x", "y"]
method = "fedavg"
rounds = 1
[image]
mode = "L"
height = 28
width = 28
mean = [0.5]
std = [0.5]
"""


@pytest.fixture
def coordinator(home: Home, processes: Plant) -> Iterator[Home]:
    """Its home, while it runs in a process of its own."""
    process = processes.fedcg("coordinator", "coordinator", "run")
    wait_until(lambda: "http://" in processes.log("coordinator") or process.poll() is not None, "it listens")
    assert process.poll() is None, processes.log("coordinator")
    yield home
    assert process.poll() is None, processes.log("coordinator")


def ask(home: Home, *words: object) -> Any:
    """The data of a command on the coordinator's machine."""
    done = run_fedcg(*words, "--dir", home.root, "--json")
    assert done.exit_code == 0, done.output
    return data_of(done.stdout)


def failure(*words: object, environment: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """The exit code and the error of a command that fails."""
    done = run_fedcg(*words, "--json", environment=environment)
    envelope = json.loads(done.stdout.splitlines()[-1])
    assert envelope["ok"] is False, done.output
    assert set(envelope["error"]) == {"type", "message", "next"}
    assert envelope["error"]["next"]
    return done.exit_code, envelope["error"]


def steered(home: Home) -> list[Any]:
    """One of each change, and what it answers."""
    return [
        ask(home, "federation", "pause", "--reason", "the line is rebuilt")["status"],
        ask(home, "federation", "show")["reason"],
        ask(home, "federation", "resume")["status"],
        ask(home, "federation", "set", FEDERATION, "rounds=40", "max_clients=2", "deadline_s=90.5")["policy"]["rounds"],
        ask(home, "federation", "set", FEDERATION, "late=next")["policy"]["late"],
        ask(home, "federation", "set", FEDERATION, "max_clients=none")["policy"]["max_clients"],
        ask(home, "federation", "extend", "--rounds", "2")["rounds"],
        ask(home, "device", "disable", "a", "--reason", "maintenance")["disabled_because"],
        ask(home, "device", "enable", "a")["disabled_at"],
        [device["id"] for device in ask(home, "device", "list", "--search", "b")],
        ask(home, "device", "revoke", "b")["was_member"],
        ask(home, "token", "revoke", ask(home, "token", "create", "--device", "c")["id"])["state"],
        ask(home, "federation", "stop", "--reason", "enough")["reason"],
        [one["status"] for one in ask(home, "federation", "list")],
    ]


OUTCOME = [
    "paused",
    "the line is rebuilt",
    "running",
    40,
    "next",
    None,
    42,
    "maintenance",
    None,
    ["b"],
    True,
    "revoked",
    "enough",
    ["stopped"],
]


def test_commands_steer_a_running_coordinator_which_audits_them(coordinator: Home) -> None:
    assert steered(coordinator) == OUTCOME
    lines = [json.loads(line) for line in coordinator.audit_file.read_text().splitlines()]
    assert {line["identity"] for line in lines} == {"local"}
    assert "POST /api/v1/federations/{federation}/pause" in {line["route"] for line in lines}
    events = [json.loads(line) for line in coordinator.events_file.read_text().splitlines()]
    assert "paused" in {event.get("status") for event in events if event["event"] == "steered"}


def test_the_same_commands_do_the_same_where_no_coordinator_runs(home: Home) -> None:
    assert steered(home) == OUTCOME


@pytest.mark.slow
def test_a_federation_that_is_created_while_a_coordinator_runs_is_at_work_without_a_restart(
    coordinator: Home, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(SECOND)
    assert ask(coordinator, "federation", "create", plan, "--no-start")["epoch"] is None
    assert ask(coordinator, "federation", "start", "second")["status"] == "running"
    wait_until(lambda: ask(coordinator, "federation", "show", "second")["epoch"] is not None, "its service runs")
    plan.write_text(SECOND.replace("second", "third"))
    assert ask(coordinator, "federation", "continue", plan, "second")["continued_from"] == "second"
    code, error = failure("federation", "create", plan, "--dir", coordinator.root)
    assert (code, "already" in error["message"]) == (EXISTS, True)


def test_a_federation_that_is_finished_is_shown_so(home: Home) -> None:
    add_federation(home, "over", spec=tiny_spec(), policy=policy_of(1, 2))
    with store_of(home.root) as (_, store):
        first = store.aggregates("over")[0]
        store.open_attempt("over", RoundAttempt(1, 1), first.artifact, frozenset({"a", "b"}), 1.0, 2.0)
        store.close_attempt(replace(first, round=1, attempt=1))
    listed = run_fedcg("federation", "list", "--dir", home.root).stdout
    assert re.search(r"^over +finished +finished +1 of 1 ", listed, re.MULTILINE), listed
    assert re.search(rf"^{FEDERATION} +running +waiting ", listed, re.MULTILINE), listed


def test_a_device_that_is_disabled_is_shown_with_the_end_of_its_certificate(home: Home) -> None:
    until = ask(home, "device", "show", "a")["certificate_expires_at"]
    for change in ("disable", "enable"):
        shown = run_fedcg("device", change, "a", "--dir", home.root).stdout
        assert moment(until) in shown.splitlines()[1], shown


@pytest.mark.parametrize("words", [("--for", "999999999d"), ("--for", "3651d")])
def test_a_time_of_a_token_that_is_too_long_is_refused_with_its_bound(home: Home, words: tuple[str, str]) -> None:
    made = ("coordinator", "token", "create", "--name", "ann", "--role", "viewer")
    code, error = failure(*made, *words, "--dir", home.root)
    assert (code, error["message"]) == (BAD_INPUT, f"--for {words[1]}: choose at most 3650d")


def test_over_the_network_a_token_allows_what_its_role_allows(coordinator: Home) -> None:
    made = ask(coordinator, "coordinator", "token", "create", "--name", "ann", "--role", "viewer", "--for", "30d")
    assert made["token"] not in coordinator.database.read_bytes().decode("latin-1")
    url, own = coordinator.config().api.url, {"FEDCG_API_TOKEN": made["token"]}
    shown = run_fedcg("federation", "show", "--url", url, "--json", environment=own)
    assert data_of(shown.stdout)["federation"] == FEDERATION
    code, error = failure("federation", "stop", "--url", url, environment=own)
    assert (code, "operator" in error["message"]) == (4, True)
    ask(coordinator, "coordinator", "token", "revoke", made["id"])
    code, error = failure("federation", "show", "--url", url, environment=own)
    assert (code, error["type"]) == (4, "Access")
    listed = run_fedcg("coordinator", "token", "list", "--dir", coordinator.root)
    assert re.search(r"^ID +NAME +ROLE +STATE +EXPIRES +LAST USED$", listed.output, re.MULTILINE)
    assert re.search(r"ann +viewer +revoked +until \S+ \S+ UTC", listed.output)
    assert made["token"] not in listed.output


def test_status_names_open_problems_and_check_makes_them_an_exit_code(coordinator: Home) -> None:
    shown = run_fedcg("coordinator", "status", "--dir", coordinator.root, "--check", "--json")
    status = data_of(shown.stdout)
    assert (shown.exit_code, status["runs"]) == (1, True)
    assert "link lost" in {problem["kind"] for problem in status["problems"]}  # no broker runs
    assert all(problem["remedy"] for problem in status["problems"])
    assert run_fedcg("coordinator", "status", "--dir", coordinator.root).exit_code == 0


def test_an_archived_federation_leaves_the_lists_and_the_ids_that_may_be_left_out_and_keeps_its_data(
    home: Home,
) -> None:
    refused = failure("federation", "archive", FEDERATION, "--dir", home.root)
    assert (refused[0], "is not over" in refused[1]["message"]) == (BAD_INPUT, True)
    ask(home, "federation", "stop")
    add_federation(home, "second", spec=tiny_spec())
    assert ask(home, "federation", "pause")["federation"] == "second"  # the one that is not over is meant
    assert ask(home, "federation", "archive", FEDERATION)["status"] == "archived"
    assert [one["federation"] for one in ask(home, "federation", "list")] == ["second"]
    assert {one["federation"] for one in ask(home, "federation", "list", "--archived")} == {FEDERATION, "second"}
    shown = sorted(run_fedcg("federation", "list", "--all", "--dir", home.root).stdout.splitlines())
    assert shown[0].split() == ["FEDERATION", "STATUS", "PHASE", "ROUND", "ONLINE", "CREATED", "REASON"]
    assert re.match(rf"{FEDERATION} +archived +waiting .* \S+ \S+ UTC  no reason given", shown[2])
    assert ask(home, "federation", "show", FEDERATION)["aggregate"]
    assert failure("federation", "resume", FEDERATION, "--dir", home.root)[0] == BAD_INPUT
    ask(home, "federation", "stop")
    assert ask(home, "federation", "set", "min_clients=3")["federation"] == "second"  # the only one that is shown
    ask(home, "federation", "archive")
    code, error = failure("federation", "show", "--dir", home.root)
    assert (code, "fedcg federation list --all" in error["message"]) == (NOT_FOUND, True)
    assert ask(home, "federation", "extend", FEDERATION, "--rounds", "1")["status"] == "running"
    assert [one["federation"] for one in ask(home, "federation", "list")] == [FEDERATION]


def test_the_output_of_a_command_ends_with_the_next_step(home: Home, tmp_path: Path) -> None:
    following = {
        ("federation", "pause"): f"to go on, fedcg federation resume {FEDERATION}",
        ("federation", "resume"): f"fedcg federation watch {FEDERATION}",
        ("federation", "stop"): f"fedcg federation archive {FEDERATION} takes it off the lists",
        ("federation", "extend", "--rounds", "1"): f"fedcg federation watch {FEDERATION}",
        ("device", "disable", "a"): "to invite it again, fedcg device enable a",
        ("device", "revoke", "b"): "to put a new machine in its place, fedcg token create --replaces b",
        ("device", "add", "c", "--out", tmp_path / "out"): "on each device, in its bundle: fedcg doctor",
        ("token", "list"): "fedcg token create",
        (
            "coordinator",
            "token",
            "create",
            "--name",
            "ann",
            "--role",
            "viewer",
        ): "to end it, fedcg coordinator token revoke",
    }
    ends = {
        words: run_fedcg(*words, "--dir", home.root).stdout.strip().rpartition("\nNext: ")[2] for words in following
    }
    assert {words: end[: len(following[words])] for words, end in ends.items()} == following


def test_fields_of_a_policy_are_read_from_words_and_what_is_wrong_comes_back_a_line_each(home: Home) -> None:
    words = ("rounds=1e24", "late=never", "deadline_s=inf", "max_clients=[1]", "min_cohort=true")
    code, error = failure("federation", "set", FEDERATION, *words, "--dir", home.root)
    assert code == BAD_INPUT
    assert [line.partition(":")[0] for line in sorted(error["message"].split("\n  ")[1:])] == [
        "deadline_s",
        "late",
        "max_clients",
        "min_cohort",
        "rounds",
    ]
    code, error = failure("federation", "set", FEDERATION, "min_clients=3", "min_clients=2", "--dir", home.root)
    assert (code, error["message"]) == (BAD_INPUT, "min_clients: given more than once")


def test_a_federation_with_masked_parts_is_shown_with_what_the_coordinator_can_not_check(home: Home) -> None:
    summed = tiny_spec().model_copy(update={"federation": "masked", "method": "fedprobe", "summed": (Part.STATISTICS,)})
    add_federation(home, "masked", spec=summed, method="fedprobe", policy=policy_of(3, 5))
    shown = run_fedcg("federation", "show", "masked", "--dir", home.root).stdout
    assert "statistics behind masks: only the sum over 4 devices or more is read, and no screening sees one" in shown
    assert "behind masks" not in run_fedcg("federation", "show", FEDERATION, "--dir", home.root).stdout


def test_each_kind_of_failure_has_its_exit_code(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"FEDCG_API_TOKEN": f"fcga_{'0' * 16}_{'0' * 64}"}
    assert failure("federation", "set", FEDERATION, "rounds", "--dir", home.root)[0] == 2
    assert failure("federation", "set", FEDERATION, "rounds=0", "--dir", home.root)[0] == 2
    assert failure("federation", "show", "nobody", "--dir", home.root)[0] == NOT_FOUND
    assert failure("federation", "show", "--dir", home.root / "nowhere")[0] == NOT_FOUND
    assert failure("federation", "shwo")[0] == 2
    assert failure("federation", "show", "--url", "http://127.0.0.1:1")[0] == 4
    assert failure("federation", "show", "--url", f"http://127.0.0.1:{free_port()}", environment=token)[0] == 4
    monkeypatch.setattr("coordinator.cli.client.TIMEOUT_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert failure("federation", "show", "--url", url, environment=token)[0] == 3
    home.database.write_bytes(b"not a database" * 1000)
    assert failure("federation", "show", "--dir", home.root)[0] == 1


def test_a_change_whose_connection_breaks_is_asked_for_once_more_and_not_made_twice() -> None:
    body = b'{"type": "urn:fedcg:used-key", "detail": "asked for before"}'
    answers = (b"", b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
    keys = []

    def serve(server: socket.socket) -> None:
        for answer in answers:
            link, _ = server.accept()
            with link:
                keys.append(re.findall(rb"Idempotency-Key: (\S+)", link.recv(65_536), re.IGNORECASE))
                link.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, args=(server,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        code, error = failure("token", "create", "--url", url, environment={"FEDCG_API_TOKEN": "fcga_0_0"})
        thread.join(20)
    assert (code, "broke while the change was made: look whether it was" in error["message"]) == (4, True)
    assert keys[0] == keys[1] != []


def test_a_command_without_a_coordinator_keeps_one_from_starting_only_while_it_steers(home: Home) -> None:
    seen = []
    with home.locked():
        seen.append(home.is_held)
    seen.append(home.is_held)
    assert seen == [True, False]
    ask(home, "federation", "pause")
    with home.locked():  # a coordinator can start again
        seen.append(home.is_held)
    assert seen[-1]
