"""Requests to a running agent: who may make them, and what the agent does with anything that is no request."""

import json
from pathlib import Path

import pytest

from edge_client.agent import owner
from edge_client.agent.owner import (
    MAX_REQUEST_BYTES,
    OwnerRequest,
    OwnerRequests,
    PauseRequest,
    Reply,
    ResumeRequest,
    StatusRequest,
    ask_agent,
    failure,
    success,
)
from edge_client.errors import NotRunningError, OwnerRequestError
from tests.support.edge.answering_agent import answering_agent

VALID = {"v": 1, "command": "pause", "for_s": 60.0, "reason": "", "now": False}


def reply_to(store: Path, text: bytes) -> dict[str, object]:
    """The reply of an agent to a raw request."""
    requests = OwnerRequests(store)
    requests.open()
    (store / "control" / "1.request").write_bytes(text)
    requests.answer_all(lambda request: pytest.fail(f"{request} was carried out"))
    requests.close()
    assert not (store / "control" / "1.request").exists()
    reply: dict[str, object] = json.loads((store / "control" / "1.answer").read_text())
    return reply


def test_a_request_reaches_the_agent_and_gets_its_answer_and_no_file_is_left(tmp_path: Path) -> None:
    with answering_agent(tmp_path, success({"answered": True})) as taken:
        assert ask_agent(tmp_path, PauseRequest(for_s=60)) == {"answered": True}
    assert taken == [PauseRequest(for_s=60)]
    assert [path.name for path in (tmp_path / "control").iterdir()] == ["lock"]
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o700


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
        ({"reason": "x" * MAX_REQUEST_BYTES}, str(MAX_REQUEST_BYTES)),
    ],
)
def test_a_request_outside_the_schema_is_refused_by_field(
    tmp_path: Path, change: dict[str, object], field: str
) -> None:
    reply = reply_to(tmp_path, json.dumps({**VALID, **change}).encode())
    assert reply["ok"] is False
    assert field in str(reply["error"])


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b'{"command": "status"'])
def test_bytes_that_are_no_request_are_refused(tmp_path: Path, text: bytes) -> None:
    assert reply_to(tmp_path, text)["ok"] is False


def test_a_request_that_cannot_be_read_is_reported_once_and_holds_up_no_other_one(tmp_path: Path) -> None:
    requests, taken = OwnerRequests(tmp_path), []
    requests.open()
    (tmp_path / "control" / "1.request").mkdir()
    (tmp_path / "control" / "2.request").write_text(StatusRequest().model_dump_json())

    def answer(request: OwnerRequest) -> Reply:
        taken.append(request)
        return success({})

    with pytest.raises(IsADirectoryError):
        requests.answer_all(answer)
    for _ in range(2):
        requests.answer_all(answer)
    assert taken == [StatusRequest()]
    requests.close()


def test_without_an_agent_the_error_names_the_store_and_the_next_step(tmp_path: Path) -> None:
    (tmp_path / "left" / "control").mkdir(parents=True)
    for name in ("lock", "1.request"):
        (tmp_path / "left" / "control" / name).touch()  # by an agent that was killed
    for store in (tmp_path / "absent", tmp_path / "left"):
        with pytest.raises(NotRunningError, match=f"{store.name}: start it with `fedcg agent run`"):
            ask_agent(store, ResumeRequest())
    with answering_agent(tmp_path / "left", success({})) as taken:  # what was left is not carried out
        assert ask_agent(tmp_path / "left", StatusRequest()) == {}
    assert taken == [StatusRequest()]


def test_a_loop_that_does_not_answer_in_time_is_named_and_the_request_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "ANSWER_S", 0.1)
    requests = OwnerRequests(tmp_path)
    requests.open()
    with pytest.raises(OwnerRequestError, match="busy"):
        ask_agent(tmp_path, PauseRequest())
    requests.answer_all(lambda request: pytest.fail(f"{request} was carried out"))
    requests.close()


@pytest.mark.parametrize("reply", [[], {"ok": True, "data": 1}, failure("why")])
def test_an_answer_of_another_form_is_an_error(tmp_path: Path, reply: object) -> None:
    with answering_agent(tmp_path, reply), pytest.raises(OwnerRequestError):
        ask_agent(tmp_path, StatusRequest())
