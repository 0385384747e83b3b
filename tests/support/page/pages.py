"""The page of federations on a broker in memory, over real HTTP, and a client with cookies and without script."""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from urllib.parse import urlencode

import uvicorn
from fastapi import FastAPI

from coordinator.config import CoordinatorConfig, EnrolmentSettings, render_config
from coordinator.http.app import create_app
from coordinator.members.api_tokens import ApiTokens, Role
from coordinator.page import add_page
from coordinator.paths import Home
from coordinator.storage.database import HighWater
from fedcg.files import checked_secret
from tests.support.coordinator.federations import Federations
from tests.support.waiting import free_port, wait_until

FORM_TOKEN = re.compile(r'name="form_token" value="([0-9a-f]+)"')


@dataclass
class Reader:
    """Asks for pages as a browser without script does; keeps the session's cookie."""

    port: int
    cookie: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def get(self, path: str) -> tuple[int, str]:
        status, _, text = self.ask("GET", path)
        return status, text

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], str]:
        status, found, content = self.transfer(method, path, body, **headers)
        return status, found, content.decode()

    def transfer(self, method: str, path: str, body: str = "", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """The answer with its body as it crosses the network."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        cookies = {"Cookie": self.cookie} if self.cookie else {}
        try:
            link.request(method, path, body or None, {**cookies, **self.headers, **headers})
            answer = link.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            link.close()

    def post(self, path: str, form_of: str = "", **fields: str) -> tuple[int, dict[str, str], str]:
        """Send a form; its hidden token is taken from the page `form_of`."""
        if form_of:
            found = FORM_TOKEN.search(self.get(form_of)[1])
            assert found is not None, f"{form_of} has no form"
            fields["form_token"] = found[1]
        kind = {"Content-Type": "application/x-www-form-urlencoded"}
        return self.ask("POST", path, urlencode(fields), **kind)

    def log_in(self, token: str) -> Reader:
        status, headers, text = self.post("/login", token=token)
        assert status == 303, text
        self.cookie = headers["set-cookie"].partition(";")[0]
        return self


@dataclass
class ServedPage:
    """The page of a running coordinator."""

    made: Federations
    port: int
    application: FastAPI

    def token(self, role: Role = Role.OPERATOR) -> str:
        return ApiTokens(self.made.world.store.api).create(role.value, role).text

    def reader(self, role: Role = Role.OPERATOR) -> Reader:
        return Reader(self.port).log_in(self.token(role))


@contextmanager
def served(made: Federations) -> Iterator[ServedPage]:
    """Run the coordinator of these federations with its page; its devices are started by the test."""
    home = Home(made.world.root)
    config = CoordinatorConfig(enrolment=EnrolmentSettings(port=8444))
    home.config_file.write_text(render_config(config))
    home.secret_file.write_bytes(checked_secret(b"s" * 32))
    HighWater(home, made.world.store._engine).lift()  # of the world's database, which has no home before
    ended: list[int] = []
    application = create_app(home, made.coordinator, ended.append, until_finished=False, beside=lambda _: nullcontext())
    add_page(application)
    port = free_port()
    server = uvicorn.Server(
        uvicorn.Config(application, port=port, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the page is served")
        assert server.started
        yield ServedPage(made, port, application)
    finally:
        server.should_exit = True
        thread.join(30)
        for device in (device for devices in made.devices.values() for device in devices):
            if hasattr(device, "transport"):
                device.stop()
    assert not ended
