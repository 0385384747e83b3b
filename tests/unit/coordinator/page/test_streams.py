"""Events as they happen, over real HTTP; problems posted to a webhook."""

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from coordinator.facts.problems import Problem
from coordinator.http import event_stream
from coordinator.members.api_tokens import ApiTokens, Role
from coordinator.page.webhook import ProblemWatch, watching
from coordinator.rounds.records import ParticipantState
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.coordinator.world import MakeWorld
from tests.support.page.pages import ServedPage, tiny_page
from tests.support.waiting import wait_until


@pytest.fixture
def page(tmp_path: Path) -> Iterator[ServedPage]:
    with tiny_page(tmp_path) as running:
        yield running


class Stream:
    """An open event stream, read up to an event."""

    def __init__(self, port: int, token: str, last_id: str = "") -> None:
        self.link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        resumed = {"Last-Event-ID": last_id} if last_id else {}
        headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip", **resumed}
        self.link.request("GET", "/api/v1/events/stream", headers=headers)
        self.answer = self.link.getresponse()
        assert self.answer.getheader("Content-Type", "").startswith("text/event-stream")
        assert self.answer.getheader("Content-Encoding") is None  # compressing would hold events back
        self.last_id = ""

    def until(self, name: str = "") -> list[str]:
        """The names of the events up to this one, or up to the first id."""
        found: list[str] = []
        while name not in found if name else not self.last_id:
            line = self.answer.readline().decode().strip()
            if line.startswith("data: "):
                found.append(json.loads(line[6:])["event"])
            elif line.startswith("id: "):
                self.last_id = line[4:]
        return found

    def first_id(self) -> str:
        self.until()
        return self.last_id

    def close(self) -> None:
        self.link.close()


def test_a_stream_goes_on_from_the_last_event_that_its_reader_has(page: ServedPage) -> None:
    token = page.token(Role.VIEWER)
    with closing(Stream(page.port, token)) as stream:
        before = stream.first_id()
        page.made.operations.disable("a")
        assert stream.until("device_disabled") == ["device_disabled"]
    page.made.operations.enable("a")
    page.made.operations.disable("b")
    with closing(Stream(page.port, token, before)) as again:
        found = again.until("device_enabled")
        assert (found[0], found[-1]) == ("device_disabled", "device_enabled")
        found = again.until("device_disabled")
    with closing(Stream(page.port, token, "nonsense")) as fresh:
        fresh.first_id()
        page.made.operations.pause("tiny")
        assert fresh.until("steered")[-1] == "steered"


def test_a_stream_ends_soon_after_its_token_was_revoked(page: ServedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "RECHECK_S", 0.1)
    tokens = ApiTokens(page.made.world.store.api)
    kept, revoked = (tokens.create(name, Role.VIEWER) for name in ("kept", "revoked"))
    with closing(Stream(page.port, kept.text)) as other, closing(Stream(page.port, revoked.text)) as stream:
        stream.first_id()
        tokens.revoke(revoked.record.id)
        assert b"data:" not in stream.answer.read()  # it ends
        page.made.operations.disable("a")
        assert other.until("device_disabled") == ["device_disabled"]


def test_a_token_has_a_bounded_number_of_streams(page: ServedPage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "MAX_OF_TOKEN", 2)
    token, headers = page.token(Role.VIEWER), "/api/v1/events/stream"
    with closing(Stream(page.port, token)) as one, closing(Stream(page.port, token)) as two:
        for stream in (one, two):
            stream.first_id()
        with closing(http.client.HTTPConnection("127.0.0.1", page.port, timeout=20)) as link:
            link.request("GET", headers, headers={"Authorization": f"Bearer {token}"})
            refused = link.getresponse()
            assert (refused.status, b"2 of them with this token" in refused.read()) == (503, True)
        with closing(Stream(page.port, page.token(Role.VIEWER))) as another:
            another.first_id()


def test_a_problem_opens_and_closes_once_it_has_settled() -> None:
    watch, one = ProblemWatch(settled_looks=2), Problem("link lost", "tiny", "no link", "start the broker")
    assert watch.look([one]) == ([], [])
    assert watch.look([]) == ([], [])
    assert watch.look([one]) == ([], [])
    assert watch.look([one]) == ([one], [])
    assert watch.look([one]) == ([], [])
    assert watch.look([]) == ([], [])
    assert watch.look([]) == ([], [one])
    assert watch.look([]) == ([], [])


class Receiver(BaseHTTPRequestHandler):
    """Takes what is posted, the second time."""

    posted: ClassVar[list[dict[str, object]]] = []
    refused: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.refused:
            self.refused.append(1)
            self.send_error(503)
            return
        self.posted.append(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_the_webhook_gets_each_problem_that_opens_and_closes_also_after_it_was_away(make_world: MakeWorld) -> None:
    world = make_world()
    world.store.saw_device("a", 1.0, "1")
    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    url = f"http://127.0.0.1:{receiver.server_address[1]}/hook"
    known = world.known()
    world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset({"a"}), 1.0, 2e9)
    events = world.service_context().events

    async def watch() -> None:
        async with watching(lambda: known, events, url, every_s=0.02):
            world.store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.DECLINED, "no_data")
            await asyncio.to_thread(wait_until, lambda: len(Receiver.posted) == 1, "it is posted")
            world.store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.INVITED)
            await asyncio.to_thread(wait_until, lambda: len(Receiver.posted) == 2, "its end is posted")

    try:
        asyncio.run(watch())
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join(10)
    assert [(each["event"], each["kind"], each["device"]) for each in Receiver.posted] == [
        ("problem_opened", "no data", "a"),
        ("problem_closed", "no data", "a"),
    ]
    assert "Put images where" in str(Receiver.posted[0]["remedy"])
    assert len(Receiver.refused) == 1
    assert [event["event"] for event in world.events()] == ["problem_opened", "problem_closed"]
