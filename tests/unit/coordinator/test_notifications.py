"""Notifications about problems, by real HTTP, SMTP and Mosquitto: what opens and closes, throttling, tests, refused receivers."""

import asyncio
import json
import os
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult
from paho.mqtt import client as paho
from paho.mqtt.enums import CallbackAPIVersion

from coordinator.config import CoordinatorConfig, NotifySettings, render_config
from coordinator.facts.problems import Problem
from coordinator.members.api_tokens import Role
from coordinator.notifications import Email, HomeAssistant, Notice, Notifier, ProblemWatch, watching
from coordinator.paths import Home
from coordinator.rounds.records import ParticipantState
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.messages.schemas import RoundAttempt
from tests.support.commands import run_fedcg
from tests.support.coordinator.world import MakeWorld, World
from tests.support.page.pages import tiny_page
from tests.support.waiting import free_port, wait_until

OPENED = Notice("problem_opened", Problem("link lost", "tiny", "no link", "Start the broker."))
CLOSED = replace(OPENED, event="problem_closed")


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


@contextmanager
def receiving() -> Iterator[str]:
    """The URL of a receiver that refuses its first post."""
    Receiver.posted.clear()
    Receiver.refused.clear()
    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=receiver.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{receiver.server_address[1]}/hook"
    finally:
        receiver.shutdown()
        receiver.server_close()
        thread.join(10)


def notifier_of(world: World, **settings: Any) -> Notifier:
    home = Home(world.root)
    home.config_file.write_text(render_config(CoordinatorConfig(notify=NotifySettings(**settings))))
    return Notifier.of(home)


def test_the_webhook_gets_each_problem_that_opens_and_closes_also_after_it_was_away(make_world: MakeWorld) -> None:
    world = make_world()
    world.store.saw_device("a", 1.0, "1")
    known = world.known()
    world.store.open_attempt("tiny", RoundAttempt(1, 1), world.base_id, frozenset({"a"}), 1.0, 2e9)
    events = world.service_context().events

    async def watch(url: str) -> None:
        async with watching(lambda: known, events, notifier_of(world, webhook=url), every_s=0.02):
            world.store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.DECLINED, "no_data")
            await asyncio.to_thread(wait_until, lambda: len(Receiver.posted) == 1, "it is posted")
            world.store.answer("tiny", RoundAttempt(1, 1), "a", ParticipantState.INVITED)
            await asyncio.to_thread(wait_until, lambda: len(Receiver.posted) == 2, "its end is posted")

    with receiving() as url:
        asyncio.run(watch(url))
    assert [(each["event"], each["kind"], each["device"]) for each in Receiver.posted] == [
        ("problem_opened", "no data", "a"),
        ("problem_closed", "no data", "a"),
    ]
    assert "Put images where" in str(Receiver.posted[0]["remedy"])
    assert len(Receiver.refused) == 1
    assert [event["event"] for event in world.events()] == ["problem_opened", "problem_closed"]


class Mailbox:
    """Keeps the e-mails that a user with a password sends."""

    def __init__(self) -> None:
        self.mails: list[str] = []

    async def handle_DATA(  # noqa: N802 - named by aiosmtpd
        self, _server: Any, _session: Any, envelope: Any
    ) -> str:
        self.mails.append(envelope.content.decode())
        return "250 OK"


def allowed(_server: Any, _session: Any, _envelope: Any, _mechanism: str, given: Any) -> AuthResult:
    return AuthResult(success=(given.login, given.password) == (b"fedcg", b"secret"), handled=False)


def test_one_email_has_everything_since_the_last(make_world: MakeWorld) -> None:
    world, box, port = make_world(), Mailbox(), free_port()
    (world.root / "password").write_text("secret\n")
    server = Controller(box, "127.0.0.1", port, authenticator=allowed, auth_require_tls=False)
    server.start()
    try:
        channels = notifier_of(
            world,
            smtp=f"smtp://fedcg@127.0.0.1:{port}",
            smtp_password_file="password",
            mail_from="fedcg@example.com",
            mail_to=("a@example.com", "b@example.com"),
        ).channels
        mail = channels["mail"]
        assert isinstance(mail, Email)
        waiting = deque([OPENED, CLOSED])
        assert mail.attempt(waiting, world.known()) and not waiting  # noqa: PT018
        (first,) = box.mails
        assert "To: a@example.com, b@example.com" in first
        assert "Subject: FedCG Edge: opened: link lost: tiny and 1 more" in first
        assert "Start the broker." in first
        waiting.append(OPENED)
        assert mail.attempt(waiting, world.known())
        assert (len(waiting), len(box.mails)) == (1, 1)  # within the same 15 minutes
        assert Notifier(channels).test("mail", world.known()).failure == ""
        assert len(box.mails) == 2
        mail.sent_at = 0.0
        assert mail.attempt(waiting, world.known())
        assert len(box.mails) == 3
    finally:
        server.stop()
    mail.sent_at = 0.0
    waiting.append(OPENED)
    assert not mail.attempt(waiting, world.known())
    assert "Connection refused" in mail.failure
    assert len(waiting) == 1


@contextmanager
def plain_broker(folder: Path) -> Iterator[int]:
    """The port of a Mosquitto without TLS for the user fedcg, password secret."""
    found = find_mosquitto()
    assert found is not None
    folder.mkdir()
    port, users = free_port(), folder / "users"
    subprocess.run(["mosquitto_passwd", "-b", "-c", str(users), "fedcg", "secret"], check=True, capture_output=True)
    lines = [f"listener {port} 127.0.0.1", "allow_anonymous false", f"password_file {users}"]
    lines += ["user root"] if os.geteuid() == 0 else []
    (folder / "conf").write_text("\n".join(lines) + "\n")
    broker = subprocess.Popen([str(found.binary), "-c", str(folder / "conf")], env=found.environment())
    try:
        wait_until(lambda: _listens(port), "mosquitto listens")
        yield port
    finally:
        broker.kill()
        broker.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def subscribed(port: int) -> Iterator[dict[str, str]]:
    """The last text of each topic."""
    seen: dict[str, str] = {}
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.username_pw_set("fedcg", "secret")
    client.on_connect = lambda *_: client.subscribe("#") and None
    client.on_message = lambda _c, _u, message: seen.update({message.topic: message.payload.decode()})
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        yield seen
    finally:
        client.disconnect()
        client.loop_stop()


def test_home_assistant_discovers_devices_rounds_and_problems(make_world: MakeWorld, tmp_path: Path) -> None:
    world = make_world()
    (world.root / "password").write_text("secret")
    with plain_broker(tmp_path / "broker") as port:
        server = {"mqtt": f"mqtt://fedcg@127.0.0.1:{port}"}
        home = notifier_of(world, **server, mqtt_password_file="password").channels["mqtt"]
        assert isinstance(home, HomeAssistant)
        with subscribed(port) as seen:
            assert home.attempt(deque([OPENED]), world.known()), home.failure
            wait_until(lambda: "fedcg/problem" in seen, "the problem is published")
            config = json.loads(seen["homeassistant/binary_sensor/fedcg/device_a/config"])
            assert (config["name"], config["device_class"]) == ("a", "connectivity")
            assert seen[config["state_topic"]] == "OFF"
            round_of = json.loads(seen["homeassistant/sensor/fedcg/federation_tiny/config"])
            assert seen[round_of["state_topic"]].isdigit()
            assert json.loads(seen[round_of["json_attributes_topic"]])["rounds"] == world.spec.rounds
            assert json.loads(seen["fedcg/problem"])["kind"] == "link lost"
            seen.clear()
            assert home.attempt(deque(), world.known())  # nothing changed, so nothing is published
            assert not seen
        with subscribed(port) as kept:
            wait_until(lambda: "fedcg/problems/state" in kept, "states are retained")
            assert "fedcg/problem" not in kept
        wrong = notifier_of(world, **server).channels["mqtt"]
        assert not wrong.attempt(deque([OPENED]), world.known())
        assert "Not authorized" in wrong.failure


def test_a_test_button_says_what_failed(tmp_path: Path) -> None:
    with receiving() as url, tiny_page(tmp_path) as page:
        page.application.state.notifier = notifier_of(page.made.world, webhook=url)
        reader = page.reader()
        status, headers, _ = reader.post("/notifications/webhook/test", form_of="/notifications")
        assert (status, headers["location"]) == (303, "/notifications")
        assert "HTTP Error 503" in reader.get("/notifications")[1]
        token = {"FEDCG_API_TOKEN": page.token()}
        told = run_fedcg(
            "coordinator", "notify", "webhook", "--url", f"http://127.0.0.1:{page.port}", environment=token
        )
        assert told.exit_code == 0, told.output
        assert [one["event"] for one in Receiver.posted] == ["test"]
        viewer = {"Authorization": f"Bearer {page.token(Role.VIEWER)}"}
        place = f"http://127.0.0.1:{page.port}/api/v1/notifications"
        (listed,) = httpx.get(place, headers=viewer).json()
        assert (listed["name"], listed["target"], listed["failure"], listed["waiting"]) == ("webhook", url, "", 0)
        assert httpx.post(f"{place}/webhook/test", headers=viewer).status_code == 403
        operator = {"Authorization": f"Bearer {page.token()}"}
        missing = httpx.post(f"{place}/mail/test", headers=operator)
        assert (missing.status_code, "set are: webhook" in missing.text) == (404, True)
