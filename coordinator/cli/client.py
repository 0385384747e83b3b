"""Connects commands to a coordinator: through the API of a running one, else through the same routes inside this process.

A command has one code path whether a coordinator is running or not. Both cases refuse the same requests with the same messages.
"""

import asyncio
import os
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import httpx
import typer
from fastapi import FastAPI

from coordinator.errors import AccessError, CoordinatorError, HomeError, NotFoundError, RequestError
from coordinator.http.app import add_api
from coordinator.http.operator_api import LEFT_OUT
from coordinator.http.refusals import EXISTS_KIND, USED_KIND
from coordinator.members.api_tokens import ApiTokens, local_token
from coordinator.paths import Home
from coordinator.rounds.records import FederationRecord
from coordinator.service.coordinator import Coordinator
from coordinator.storage.artifacts import artifacts_of
from coordinator.storage.database import explained
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.store import Store
from fedcg.errors import EXISTS, FAILED, NOT_FOUND, NoAnswerInTimeError
from fedcg.values import Value

API = "/api/v1"
TOKEN_VARIABLE = "FEDCG_API_TOKEN"  # noqa: S105 - the name of a variable
TIMEOUT_S = 120.0
STARTING_S = 5.0
"""How long to retry while a coordinator holds its directory but does not listen yet."""
RETRY_S = 0.2
REFUSED = (401, 403)


class RequestFailedError(CoordinatorError):
    """The running coordinator failed to handle the request; its log has the reason."""

    exit_code = FAILED


class Client(Value):
    """Makes requests of the API.

    Attributes:
        url: base URL of the coordinator.
        token: API token.
        application: used instead of a connection when no coordinator is running.
        home: the coordinator's directory, if it is on this machine.
        verify: how to check the server's certificate.
    """

    url: str
    token: str
    application: FastAPI | None = None
    home: Home | None = None
    verify: ssl.SSLContext | bool = True

    @property
    def is_remote(self) -> bool:
        """Whether requests go to a running coordinator."""
        return self.application is None

    def get(self, path: str, **query: object) -> Any:
        """Read one thing.

        Raises:
            FedcgError: the request was refused or got no answer; its class has the exit code.
        """
        return self._asked("GET", f"{API}{path}", params=_given(query)).json()

    def all(self, path: str, **query: object) -> list[Any]:
        """Read a list. If an answer can't hold all items, the number of omitted ones goes to standard error."""
        answer = self._asked("GET", f"{API}{path}", params=_given(query))
        found: list[Any] = answer.json()
        if left_out := answer.headers.get(LEFT_OUT):
            typer.echo(f"{left_out} more are not shown: one answer has {len(found)}", err=True)
        return found

    def change(self, method: str, path: str, content: object = None) -> Any:
        """Make a change. If the connection breaks, the request is sent once more; the change is made at most once."""
        key = {"Idempotency-Key": str(uuid.uuid4())}
        answer = self._asked(method, f"{API}{path}", json=content, headers=key)
        return answer.json() if answer.content else None

    def federation(self, named: str | None) -> str:
        """The id of the named federation. Without a name: of the only active one, else of the only one.

        Raises:
            RequestError: there are several or none.
        """
        if named is not None:
            return named
        there = self.all("/federations")
        live = [known for known in there if known["status"] not in ("finished", "stopped")]
        names = [str(known["federation"]) for known in (live or there)]
        if len(names) != 1:
            there_are = (
                f"there are: {', '.join(names)}" if names else "`fedcg federation list --all` lists archived ones"
            )
            raise RequestError(f"name a federation; {there_are}", exit_code=None if names else NOT_FOUND)
        return names[0]

    def _asked(self, method: str, path: str, **request: Any) -> httpx.Response:
        with self._alone(method, path):
            answer = self._sent(method, path, request)
        if answer.status_code >= 400:
            _refuse(answer)
        return answer

    def _alone(self, method: str, path: str) -> AbstractContextManager[None]:
        """A lock: while a change to a federation is made without a coordinator, none can start."""
        is_steering = method != "GET" and path.startswith(f"{API}/federations/")
        return self.home.locked() if self.home is not None and not self.is_remote and is_steering else nullcontext()

    def _sent(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        end, broken = time.monotonic() + STARTING_S, 0
        while True:
            try:
                answer = asyncio.run(self._send(method, path, request))
            except httpx.ConnectError as error:  # noqa: PERF203 - a request takes far longer than the block
                if self.home is None or time.monotonic() > end:
                    raise AccessError(f"no connection to {self.url}: {error}. {self._advice()}") from error
                time.sleep(RETRY_S)
            except httpx.TimeoutException as error:
                raise NoAnswerInTimeError(f"no answer from {self.url} within {TIMEOUT_S:g} s") from error
            except httpx.TransportError as error:
                broken += 1
                if broken > 1:
                    raise AccessError(f"the connection to {self.url} broke: {error}. {self._advice()}") from error
            else:
                if broken and USED_KIND in answer.text:
                    raise AccessError(
                        f"the connection to {self.url} broke during the change: check whether it was made before you repeat it"
                    )
                return answer

    def _advice(self) -> str:
        where = (
            "the address in --url" if self.home is None else "the coordinator's log (it may be starting or stopping)"
        )
        return f"Check {where}, and try again"

    async def _send(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        transport = None if self.application is None else httpx.ASGITransport(self.application)
        own = self.home is not None  # connections on this machine bypass a proxy from the environment
        headers = {"Authorization": f"Bearer {self.token}"}
        async with httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            transport=transport,
            timeout=TIMEOUT_S,
            verify=self.verify,
            trust_env=not own,
        ) as client:
            return await client.request(method, path, **request)


@contextmanager
def client_of(directory: Path | None, url: str | None) -> Iterator[Client]:
    """A client of the coordinator at `url`, else of the one running in the directory, else of the directory itself.

    Raises:
        HomeError: neither is given, or the directory is not a coordinator's.
        AccessError: `url` is given without a token in the environment.
    """
    if url is not None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:  # the token in a directory on this machine must not go to another coordinator
            raise AccessError(
                f"--url needs a token in the variable {TOKEN_VARIABLE}; create one with `fedcg coordinator token create`"
            )
        yield Client(url.rstrip("/"), token)
        return
    if directory is None:
        raise HomeError(f"name the coordinator with --dir HOME on its machine, or with --url and {TOKEN_VARIABLE}")
    home = Home(directory).require()
    with explained(home), closing(Store.of(home)) as store:
        token = local_token(home, ApiTokens(store.api))
        if not home.is_held:
            yield Client("http://127.0.0.1", token, _application(home, store), home)
            return
    yield Client(home.config().api.url, token, home=home, verify=_trusting(home))


def _given(query: Mapping[str, object]) -> dict[str, str]:
    """The query parameters that have a value."""
    return {name: str(value) for name, value in query.items() if value not in (None, "")}


def _trusting(home: Home) -> ssl.SSLContext | bool:
    certificate = home.config().api.certificate
    if certificate is None:
        return True
    context = ssl.create_default_context(cafile=str(home.root / certificate))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # exactly this certificate is trusted, for any host name
    return context


def _application(home: Home, store: Store) -> FastAPI:
    """The API routes for a directory in which no coordinator is running."""

    def no_context(record: FederationRecord) -> NoReturn:
        raise AssertionError(f"a command does not run {record.id}")

    events = coordinator_log(home.events_file, store.events)
    application = FastAPI()
    add_api(application, home, Coordinator(store, artifacts_of(home), events, no_context))
    return application


def _refuse(answer: httpx.Response) -> NoReturn:
    """Raise the error that matches an error response."""
    try:
        problem = answer.json()
        message = "\n  ".join([str(problem["detail"]), *map(str, problem.get("problems", ()))])
    except (ValueError, KeyError, TypeError):
        message = f"{answer.url} answered {answer.status_code} without problem details; is it a coordinator?"
    if answer.status_code in REFUSED:
        raise AccessError(message)
    if answer.status_code == 404:
        raise NotFoundError(message)
    if answer.status_code == 429 or answer.status_code >= 500:
        raise RequestFailedError(message)
    raise RequestError(message, exit_code=EXISTS if EXISTS_KIND in answer.text else None)
