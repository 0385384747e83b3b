"""The commands that steer: through the API of a running coordinator, over the network with a token, and without a coordinator."""

import csv
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.opening import create_home
from coordinator.cli.shared_options import store_of
from coordinator.config import CoordinatorConfig
from coordinator.operations.create_federation import example_plan
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.errors import BAD_INPUT, EXISTS, NOT_FOUND
from fedcg.learning.spec import FederationSpec
from fedcg.wire.messages.enrolment_messages import Token, certificate_key_digest, load_certificate
from fedcg.wire.messages.schemas import RoundAttempt
from fedcg.wire.parts import Part
from tests.support.broker.broker_plant import Plant
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.homes import add_federation
from tests.support.coordinator.toy_artifacts import FEDERATION, tiny_spec
from tests.support.waiting import free_port, wait_until


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
    return data_of(succeeds(*words, "--dir", home.root, "--json"))


def failure(*words: object, environment: dict[str, str] | None = None) -> tuple[int, dict[str, str]]:
    """The exit code and the error of a command that fails."""
    done = run_fedcg(*words, "--json", environment=environment)
    envelope = json.loads(done.stdout.splitlines()[-1])
    assert envelope["ok"] is False, done.output
    assert set(envelope["error"]) == {"type", "message", "next"}
    assert envelope["error"]["next"]
    return done.exit_code, envelope["error"]


STEERING = (
    ("federation pause --reason rebuilt", "status", "paused"),
    ("federation show", "reason", "rebuilt"),
    ("federation resume", "status", "running"),
    ("federation set tiny rounds=40 max_clients=2 deadline_s=90.5 pace=equal-time", "policy.rounds", 40),
    ("federation show", "policy.pace", "equal-time"),
    ("federation set tiny max_clients=none", "policy.max_clients", None),
    ("federation extend --rounds 2", "rounds", 42),
    ("device disable a --reason maintenance", "disabled_because", "maintenance"),
    ("device enable a", "disabled_at", None),
    ("device set a --label north --label old --site Aachen", "labels", ["north", "old"]),
    ("device set a --remove-label old --note moved", "site", "Aachen"),
    ("device revoke b", "was_member", True),
    ("device revoke b", "was_member", False),
    ("device show b", "state", "revoked"),
    ("federation stop --reason enough", "reason", "enough"),
    ("federation show", "status", "stopped"),
)
"""One of each change: the words, and what a field of the answer is then."""


def check_steering(home: Home) -> None:
    for words, field, value in STEERING:
        found = ask(home, *words.split())
        for name in field.split("."):
            found = found[name]
        assert found == value, words


def test_commands_steer_a_running_coordinator_which_audits_them(coordinator: Home) -> None:
    check_steering(coordinator)
    lines = [json.loads(line) for line in coordinator.audit_file.read_text().splitlines()]
    assert {line["identity"] for line in lines} == {"local"}
    assert "POST /api/v1/federations/{federation}/pause" in {line["route"] for line in lines}
    events = [json.loads(line) for line in coordinator.events_file.read_text().splitlines()]
    assert "paused" in {event.get("status") for event in events if event["event"] == "steered"}


def test_devices_are_forgotten_once_that_is_confirmed_and_only_where_sums_are_exact(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("federation", "forget", "tiny", "a", "b", "--dir", home.root)
    assert "nothing was changed" in failure(*words)[1]["message"]
    assert "influence of a device's data can't be removed" in failure(*words, "--yes")[1]["message"]
    monkeypatch.setattr(FederationSpec, "is_exact", True)
    shown = run_fedcg(*words, "--yes").stdout
    assert "`fedcg cohort status` on any device lists the consents" in shown
    assert shown.endswith(f"fedcg federation show --dir {home.root} tiny\n")
    assert "\nforgotten: a, b\n" in run_fedcg("federation", "show", "tiny", "--dir", home.root).stdout


def test_the_same_commands_do_the_same_where_no_coordinator_runs(home: Home) -> None:
    check_steering(home)
    assert [device["id"] for device in ask(home, "device", "list", "--search", "b")] == ["b"]
    assert [one["name"] for one in ask(home, "coordinator", "search", "aachen")] == ["a"]
    for words in ("--label north", "--site Aachen", "--search moved"):
        assert [device["id"] for device in ask(home, "device", "list", *words.split())] == ["a"]
    assert re.search(r"^a .* Aachen +north", run_fedcg("device", "list", "--dir", home.root).stdout, re.MULTILINE)
    code, error = failure("device", "set", "a", "--label", "North", "--dir", home.root)
    assert (code, "add_labels" in error["message"]) == (BAD_INPUT, True)


@pytest.mark.slow
def test_a_federation_that_is_created_while_a_coordinator_runs_is_at_work_without_a_restart(
    coordinator: Home, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(example_plan().replace('"casting"', '"second"'))
    assert ask(coordinator, "federation", "create", plan, "--no-start")["epoch"] is None
    assert ask(coordinator, "federation", "start", "second")["status"] == "running"
    wait_until(lambda: ask(coordinator, "federation", "show", "second")["epoch"] is not None, "its service runs")
    plan.write_text(example_plan().replace('"casting"', '"third"'))
    assert ask(coordinator, "federation", "continue", plan, "second@0")["continued_from"] == "second@0"
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
    assert {each["federation"]: each["status"] for each in ask(home, "federation", "list")}["over"] == "finished"
    succeeds("device", "add", "c", "--out", home.root / "bundles", "--dir", home.root)
    assert f'federation = "{FEDERATION}"' in (home.root / "bundles" / "c" / "agent.toml").read_text()


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


def test_an_archived_federation_leaves_the_lists_and_the_ids_that_may_be_left_out(home: Home) -> None:
    ask(home, "federation", "stop")
    add_federation(home, "second", spec=tiny_spec())
    assert ask(home, "federation", "pause")["federation"] == "second"  # the one that is not over is meant
    assert ask(home, "federation", "archive", FEDERATION)["status"] == "archived"
    assert [one["federation"] for one in ask(home, "federation", "list")] == ["second"]
    shown = sorted(run_fedcg("federation", "list", "--all", "--dir", home.root).stdout.splitlines())
    assert shown[0].split() == ["FEDERATION", "STATUS", "PHASE", "ROUND", "ONLINE", "CREATED", "REASON"]
    assert re.match(rf"{FEDERATION} +archived +waiting .* \S+ \S+ UTC  no reason given", shown[2])
    ask(home, "federation", "stop")
    assert ask(home, "federation", "set", "min_clients=3")["federation"] == "second"  # the only one that is shown
    ask(home, "federation", "archive")
    code, error = failure("federation", "show", "--dir", home.root)
    assert (code, "fedcg federation list --all" in error["message"]) == (NOT_FOUND, True)


def test_raising_min_clients_above_the_clients_of_the_open_attempt_is_answered_with_what_happens(home: Home) -> None:
    with store_of(home.root) as (_, store):
        store.add_device("c", "0" * 64, 1.0)
        invited = frozenset({"c", *(device.id for device in store.members())})
        store.open_attempt(FEDERATION, RoundAttempt(1, 1), "0" * 64, invited, 1.0, 2.0)
    done = [run_fedcg("federation", "set", f"min_clients={n}", "--dir", home.root).stdout for n in (3, 4)]
    assert "Round 1" not in done[0]
    assert "Round 1 is open with only 3 of 4 clients invited. This attempt ends and does not count" in done[1]
    assert "The next one opens when 4 devices are online." in done[1]


def test_a_federation_with_sealed_parts_is_shown_with_what_the_coordinator_can_not_check(home: Home) -> None:
    sealed = tiny_spec().model_copy(update={"federation": "blind", "method": "fedavg", "sealed": (Part.EXTRACTOR,)})
    add_federation(home, "blind", spec=sealed, method="fedavg", policy=policy_of(3, 5))
    shown = run_fedcg("federation", "show", "blind", "--dir", home.root).stdout
    assert "extractor sealed: only the devices of the cohort can read the mean, and screening can't check" in shown
    assert "sealed" not in run_fedcg("federation", "show", FEDERATION, "--dir", home.root).stdout


def test_each_kind_of_failure_has_its_exit_code(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    token = {"FEDCG_API_TOKEN": f"fcga_{'0' * 16}_{'0' * 64}"}
    for words, ends, why in (
        ("federation set tiny rounds", BAD_INPUT, "write FIELD=VALUE"),
        ("federation set tiny min_clients=3 min_clients=2", BAD_INPUT, "min_clients: given more than once"),
        ("federation set tiny rounds=1e24 pace=never deadline_s=inf max_clients=[1]", BAD_INPUT, "tiny: 4 problems"),
        ("federation archive", BAD_INPUT, "has not ended"),
        ("federation show nobody", NOT_FOUND, "existing ones: tiny"),
        ("device show nobody", NOT_FOUND, "fedcg device list"),
        ("device revoke nobody", NOT_FOUND, "fedcg device list"),
        ("token revoke nobody", NOT_FOUND, "fedcg token list"),
        ("token create --device a", EXISTS, "--replaces a"),
        ("token create --device Line4", BAD_INPUT, "lower-case"),
        ("token create --replaces nobody", NOT_FOUND, "no device 'nobody'"),
        ("token create --device c --replaces a", BAD_INPUT, "contradicts"),
        ("token create --enrolment-url http://127.0.0.1:1", BAD_INPUT, "https://HOST:PORT"),
        ("token create --enrolment-url https://127.0.0.1:99999", BAD_INPUT, "a port from 1 to 65535"),
        ("token create --for 0m", BAD_INPUT, "more than 0"),
        ("token create --for 999999999d", BAD_INPUT, "--for 999999999d: choose at most 90d"),
        ("token create --for 24", BAD_INPUT, "give a time span such as 90s"),
        ("coordinator token create --name x --role viewer --for 3651d", BAD_INPUT, "3651d: choose at most 3650d"),
    ):
        code, error = failure(*words.split(), "--dir", home.root)
        assert (code, why in error["message"]) == (ends, True), (words, error)
    assert ask(home, "token", "list") == []
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


def test_a_token_names_the_authority_the_place_and_its_end_and_is_shown_once(home: Home) -> None:
    made = ask(home, "token", "create", "--device", "line-4")
    token = Token.parse(made["token"])
    authority = load_certificate(credential_of(home.pki, CA_NAME).certificate.read_bytes())
    assert token.authority == certificate_key_digest(authority)
    url = home.config().url_of(home.config().enrolment)
    assert (token.url, token.device, token.id) == (url, "line-4", made["id"])
    assert 23.9 * 3600 < made["expires_at"] - time.time() <= 24 * 3600
    shown = run_fedcg("token", "create", "--dir", home.root).output
    other = Token.parse(shown.split()[0])
    assert (other.device, other.secret != token.secret) == (None, True)
    assert "fedcg enrol --token - --device ID" in shown
    assert other.text not in run_fedcg("token", "list", "--dir", home.root).output


def test_a_range_of_devices_gets_its_tokens_once_as_csv_or_none(home: Home) -> None:
    rows = list(
        csv.DictReader(
            run_fedcg("token", "create", "--device", "cam-8..cam-10", "--dir", home.root).output.splitlines()
        )
    )
    assert [Token.parse(row["token"]).device for row in rows] == ["cam-8", "cam-9", "cam-10"]
    assert all(row["line"].endswith(f"; FEDCG_TOKEN={row['token']} fedcg enrol --out tiny") for row in rows)
    listed = ask(home, "token", "list")
    assert [step["state"] for step in listed[0]["steps"]] == ["done", *["open"] * 5]
    assert run_fedcg("token", "create", "--device", "a..c", "--dir", home.root).exit_code == BAD_INPUT
    assert len(ask(home, "token", "list")) == len(listed) == 3


def test_the_changes_of_a_policy_are_told_with_author_and_values(home: Home) -> None:
    ask(home, "federation", "set", "deadline_s=900")
    ask(home, "federation", "set", "min_clients=4", "max_clients=5")
    told = ask(home, "federation", "policy")
    changes = [(each["field"], each["before"], each["after"]) for each in told["changes"]]
    assert changes == [("max_clients", None, 5), ("min_clients", 2, 4), ("deadline_s", 600.0, 900.0)]
    (name,) = {each["by"] for each in told["changes"]}
    assert re.search(rf"{name} +max_clients +none +5", run_fedcg("federation", "policy", "--dir", home.root).output)


def test_tokens_are_listed_with_what_they_are_still_good_for(home: Home) -> None:
    first, second = ask(home, "token", "create"), ask(home, "token", "create", "--for", "1ms")
    assert ask(home, "token", "revoke", first["id"])["state"] == "revoked"
    states = {entry["id"]: entry["state"] for entry in ask(home, "token", "list")}
    assert states == {first["id"]: "revoked", second["id"]: "expired"}


def test_where_nothing_listens_a_token_is_refused_with_the_next_step(tmp_path: Path) -> None:
    home = create_home(tmp_path / "other", CoordinatorConfig())
    code, error = failure("token", "create", "--dir", home.root)
    assert code == BAD_INPUT
    assert "[enrolment]" in error["message"]
    assert "fedcg device add" in error["message"]


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
    assert (code, "broke during the change: check whether it was made" in error["message"]) == (4, True)
    assert keys[0] == keys[1] != []
