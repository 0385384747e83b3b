"""Events as they happen, over real HTTP."""

import http.client
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.http import event_stream
from coordinator.members.api_tokens import ApiTokens, Role
from tests.support.page.pages import ServedPage, tiny_page


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
