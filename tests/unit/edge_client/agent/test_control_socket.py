"""The control socket: who may use it, where it lies, and what it does with anything that is no request."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_client.agent import control_socket
from edge_client.agent.control_socket import MAX_REQUEST_BYTES, SOCKET_NAME, ControlSocket, ask_agent
from edge_client.errors import NotRunningError, OwnerRequestError
from edge_client.messaging.owner_requests import Asked, PauseRequest, ResumeRequest, StatusRequest, failure, success

VALID = {"v": 1, "command": "pause", "for_s": 60.0, "reason": "", "now": False}


@pytest.fixture
def taken() -> list[Asked]:
    return []


@pytest.fixture
def store(tmp_path: Path, taken: list[Asked]) -> Iterator[Path]:
    """A folder whose socket answers every request with its command."""

    def put(asked: Asked) -> None:
        taken.append(asked)
        asked.answer.put(success({"command": asked.request.command}))

    control = ControlSocket(tmp_path, put)
    control.start()
    yield tmp_path
    control.close()
    assert not (tmp_path / SOCKET_NAME).exists()


def said(store: Path, *lines: bytes) -> list[dict[str, object]]:
    """The replies to raw lines on one connection, until the other side closes it."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(str(store / SOCKET_NAME))
        connection.sendall(b"".join(lines))
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as replies:
            return [json.loads(line) for line in replies]


def test_requests_reach_the_loop_and_get_its_answer(store: Path, taken: list[Asked]) -> None:
    assert ask_agent(store, PauseRequest(for_s=60)) == {"command": "pause"}
    assert taken[0].request == PauseRequest(for_s=60)
    replies = said(store, json.dumps(VALID).encode() + b"\n", b'{"command": "status"}\n')
    assert [reply["data"] for reply in replies] == [{"command": "pause"}, {"command": "status"}]


def test_only_the_owner_can_open_the_socket(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (store / SOCKET_NAME).stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(control_socket, "_peer", lambda connection: 12345)
    with pytest.raises(OwnerRequestError, match="no readable answer"):
        ask_agent(store, StatusRequest())


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"for_s": "60"}, "for_s"),
        ({"for_s": 0}, "for_s"),
        ({"for_s": 1e12}, "for_s"),
        ({"reason": "x" * 201}, "reason"),
        ({"now": 1}, "now"),
        ({"more": 1}, "more"),
        ({"v": 2}, "v"),
        ({"command": "erase"}, "root"),
    ],
)
def test_a_request_outside_the_schema_is_refused_by_field(
    store: Path, taken: list[Asked], change: dict[str, object], field: str
) -> None:
    (reply,) = said(store, json.dumps({**VALID, **change}).encode() + b"\n")
    assert reply["ok"] is False
    assert field in str(reply["error"])
    assert taken == []


@pytest.mark.parametrize("line", [b"\n", b"{\n", b"[]\n", b"\xff\xfe\n", b'{"command": "status"'])
def test_bytes_that_are_no_request_are_refused(store: Path, taken: list[Asked], line: bytes) -> None:
    (reply,) = said(store, line)
    assert reply["ok"] is False
    assert taken == []


def test_an_endless_line_ends_the_connection_and_the_next_one_is_served(store: Path) -> None:
    (reply,) = said(store, b" " * (MAX_REQUEST_BYTES + 1))
    assert str(MAX_REQUEST_BYTES) in str(reply["error"])
    assert ask_agent(store, StatusRequest()) == {"command": "status"}


def test_a_silent_connection_does_not_hold_up_the_others(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "IDLE_S", 0.2)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(store / SOCKET_NAME))
        assert ask_agent(store, StatusRequest()) == {"command": "status"}


def test_a_path_that_is_too_long_for_a_socket_is_reached_all_the_same(tmp_path: Path) -> None:
    store = tmp_path / ("d" * 120)
    store.mkdir()
    control = ControlSocket(store, lambda asked: asked.answer.put(success({})))
    control.start()
    try:
        assert len(str(store / SOCKET_NAME)) > 107
        assert ask_agent(store, StatusRequest()) == {}
    finally:
        control.close()


def test_without_an_agent_the_error_names_the_store_and_the_next_step(tmp_path: Path) -> None:
    for name in ("absent", "left"):
        store = tmp_path / name
        store.mkdir()
        if name == "left":  # by an agent that was killed
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(store / SOCKET_NAME))
        with pytest.raises(NotRunningError, match=f"{name}: start it with `fedcg agent run`"):
            ask_agent(store, ResumeRequest())
    control = ControlSocket(tmp_path / "left", lambda asked: asked.answer.put(success({})))
    control.start()  # in the place of the one that was left
    assert ask_agent(tmp_path / "left", StatusRequest()) == {}
    control.close()


def test_a_loop_that_does_not_answer_in_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_S", 0.1)
    control = ControlSocket(tmp_path, lambda asked: None)
    control.start()
    with pytest.raises(OwnerRequestError, match="busy"):
        ask_agent(tmp_path, StatusRequest())
    control.close()


@pytest.mark.parametrize(
    "reply", [b"", b"nothing\n", b"[]\n", b'{"ok": true, "data": 1}\n', json.dumps(failure("why")).encode()]
)
def test_an_answer_of_another_form_is_an_error(tmp_path: Path, reply: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / SOCKET_NAME))
        listener.listen()

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(MAX_REQUEST_BYTES)
                connection.sendall(reply)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OwnerRequestError):
            ask_agent(tmp_path, StatusRequest())
        thread.join()
