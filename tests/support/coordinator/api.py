"""A coordinator's HTTP interface over a loopback socket, without a broker, and requests to it from a person or a program."""

import threading
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI

from coordinator.http.access import Access
from coordinator.http.app import create_app
from coordinator.members.api_tokens import ApiTokens, Identity, NewToken, Role
from coordinator.paths import Home
from coordinator.service.coordinator import Coordinator
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.store import Store
from fedcg.listening import Caps, Connections, Listener, http_config
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from tests.support.coordinator.federations import no_context
from tests.support.waiting import wait_until


class Api:
    """A running interface on a coordinator's directory; with `coordinator`, on one that runs federations."""

    def __init__(self, home: Home, store: Store, port: int, application: FastAPI) -> None:
        self.home, self.store, self.port, self.application = home, store, port, application
        self.url, self.tokens = f"http://127.0.0.1:{port}", ApiTokens(store.api)

    @property
    def access(self) -> Access:
        """The accounts and sessions for requests."""
        access: Access = self.application.state.access
        return access

    def as_(self, role: Role | None, **headers: str) -> httpx.Client:
        """Return a client with a token of this role, or without one."""
        own = {} if role is None else {"Authorization": f"Bearer {self.tokens.create(role.value, role).text}"}
        return httpx.Client(base_url=self.url, headers={**own, **headers}, timeout=60)


def identity(token: NewToken) -> Identity:
    """The identity behind a new token."""
    return Identity(token.record.name, Role(token.record.role), token.record.id)


@contextmanager
def running_api(home: Home, coordinator: Coordinator | None = None, **settings: Any) -> Iterator[Api]:
    """Serve the interface of a directory whose federations need no broker: none is started unless `coordinator` runs one."""
    store = Store(home.database) if coordinator is None else coordinator.store
    made = coordinator or Coordinator(
        store, ArtifactStore(home.artifacts), coordinator_log(home.events_file, store.events), no_context
    )

    @asynccontextmanager
    async def nothing(_: Coordinator) -> Any:
        yield

    def ended(code: int) -> None:
        raise AssertionError(f"the interface asked to end with {code}")

    application: FastAPI = create_app(home, made, ended, until_finished=False, beside=nothing, **settings)
    listener = Listener("api", "127.0.0.1", 0, Connections(Caps(64, 64)))
    server = uvicorn.Server(http_config(application, listener, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started, "the interface listens")
        yield Api(home, store, listener.getsockname()[1], application)
    finally:
        server.should_exit = True
        thread.join(20)
        if coordinator is None:
            store.close()
