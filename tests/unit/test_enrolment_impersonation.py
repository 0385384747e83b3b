"""Somebody on the path with a certificate of the coordinator's own authority: what a box still refuses, over real TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from coordinator.home import BROKER_NAME, Home
from coordinator.provision.pki import credential_of
from edge_client.enrolment import enrol
from edge_client.errors import EnrolError
from fedcg.wire.enrolment import ENROL_PATH
from fedcg.wire.signing import SigningKey
from tests.enrolments import Desk, Pretender, json_of, open_home, running_desk

Change = Callable[[dict[str, Any]], dict[str, Any]]


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    with running_desk(open_home(tmp_path / "home")) as running:
        yield running


@contextmanager
def between(desk: Desk, role: str, change: Change) -> Iterator[Pretender]:
    """Somebody with the certificate and key of one server, who passes requests on to the true one and alters the answers."""
    home: Home = desk.home
    authority = credential_of(home.pki, "ca").certificate

    def respond(request: bytes) -> bytes:
        body = json.dumps(json_of(request)).encode()
        asked = Request(desk.url + ENROL_PATH, body, {"Content-Type": "application/json"})  # noqa: S310 - https, on loopback
        with urlopen(asked, context=ssl.create_default_context(cafile=str(authority)), timeout=20) as answer:  # noqa: S310
            return json.dumps(change(json.loads(answer.read()))).encode()

    server = Pretender(authority.read_bytes(), credential_of(home.pki, role), respond)
    try:
        yield server
    finally:
        server.close()


def test_the_brokers_key_can_not_play_the_enrolment_listener(desk: Desk, tmp_path: Path) -> None:
    """Before the role was checked the secret arrived, and the box pinned the key of the one in between."""
    theirs, token = SigningKey.generate().public.hex, desk.token("line-4")
    with between(desk, BROKER_NAME, lambda answer: {**answer, "coordinator_key": theirs}) as thief:
        with pytest.raises(
            EnrolError, match=r"of the server 'broker'.*'enrolment' is expected.*Nothing secret was sent"
        ):
            enrol(token, tmp_path / "box", url=thief.url)
    assert token.secret.hex().encode() not in thief.heard
    assert b"POST" not in thief.heard
    assert not (tmp_path / "box" / "coordinator.pub").exists()
    assert desk.store.devices() == []
