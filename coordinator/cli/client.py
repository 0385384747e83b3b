"""The commands' way to a coordinator: the API of one that runs, else the same routes inside this process, over the directory.

So a command has one path, whether a coordinator runs or not, and both refuse the same things in the same words.
"""

import asyncio
import os
import ssl
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
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

API = "/api/v1"
TOKEN_VARIABLE = "FEDCG_API_TOKEN"  # noqa: S105 - the name of a variable
TIMEOUT_S = 120.0
STARTING_S = 5.0
"""A coordinator that holds its directory and does not listen yet is asked again for so long."""
RETRY_S = 0.2
REFUSED = (401, 403)


class RequestFailedError(CoordinatorError):
    """The running coordinator could not do what it was asked for; its log has the reason."""

    exit_code = FAILED


@dataclass(frozen=True)
class Client:
    """Makes requests of the API.

    Attributes:
        url: of the coordinator.
        token: of the API.
        application: in place of a connection, when no coordinator runs.
        home: the directory, when it is of this machine.
        verify: what a server's certificate is checked with.
    """

    url: str
    token: str
    application: FastAPI | None = None
    home: Home | None = None
    verify: ssl.SSLContext | bool = True

    @property
    def is_remote(self) -> bool:
        """Whether a running coordinator answers."""
        return self.application is None

    def get(self, path: str, **query: object) -> Any:
        """Read one thing.

        Raises:
            FedcgError: the request was refused or not answered; the class has the exit code.
        """
        return self._asked("GET", f"{API}{path}", params=_given(query)).json()

    def all(self, path: str, **query: object) -> list[Any]:
        """Read a list; where it has more items than one answer, standard error gets their number."""
        answer = self._asked("GET", f"{API}{path}", params=_given(query))
        found: list[Any] = answer.json()
        if left_out := answer.headers.get(LEFT_OUT):
            typer.echo(f"{left_out} more are left out: one answer has {len(found)}", err=True)
        return found

    def change(self, method: str, path: str, content: object = None) -> Any:
        """Change something; when the connection breaks, the request is repeated once and is made at most once."""
        key = {"Idempotency-Key": str(uuid.uuid4())}
        return self._asked(method, f"{API}{path}", json=content, headers=key).json()

    def federation(self, named: str | None) -> str:
        """The id of the federation that is meant; without a name, of the one that is not over, else of the only one.

        Raises:
            RequestError: there are several, or none.
        """
        if named is not None:
            return named
        there = self.all("/federations")
        live = [known for known in there if known["status"] not in ("finished", "stopped")]
        names = [str(known["federation"]) for known in (live or there)]
        if len(names) != 1:
            there_are = (
                f"there are: {', '.join(names)}"
                if names
                else "`fedcg federation list --all` has those that are archived"
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
        """What steers a federation without a coordinator keeps one from starting until it is done."""
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
                raise NoAnswerInTimeError(f"{self.url} gave no answer in {TIMEOUT_S:g} s") from error
            except httpx.TransportError as error:
                broken += 1
                if broken > 1:
                    raise AccessError(f"the connection to {self.url} broke: {error}. {self._advice()}") from error
            else:
                if broken and USED_KIND in answer.text:
                    raise AccessError(
                        f"the connection to {self.url} broke while the change was made: look whether it was, before you repeat it"
                    )
                return answer

    def _advice(self) -> str:
        where = (
            "the address behind --url" if self.home is None else "the coordinator's log: it may be starting or ending"
        )
        return f"Look at {where}, and try again"

    async def _send(self, method: str, path: str, request: dict[str, Any]) -> httpx.Response:
        transport = None if self.application is None else httpx.ASGITransport(self.application)
        own = self.home is not None  # a proxy of the environment has no part in a connection on this machine
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
    """A client of a coordinator: the one at `url`, else the one that runs in the directory, else the directory itself.

    Raises:
        HomeError: neither is named, or there is no coordinator in the directory.
        AccessError: `url` without a token in the environment.
    """
    if url is not None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if not token:  # that of a directory on this machine is for no other coordinator
            raise AccessError(
                f"--url needs a token in the variable {TOKEN_VARIABLE}; `fedcg coordinator token create` makes one"
            )
        yield Client(url.rstrip("/"), token)
        return
    if directory is None:
        raise HomeError(f"name the coordinator: --dir HOME on its machine, or --url with {TOKEN_VARIABLE}")
    home = Home(directory).require()
    with explained(home), closing(Store.of(home)) as store:
        token = local_token(home, ApiTokens(store.api))
        if not home.is_held:
            yield Client("http://127.0.0.1", token, _application(home, store), home)
            return
    yield Client(home.config().api.url, token, home=home, verify=_trusting(home))


def _given(query: Mapping[str, object]) -> dict[str, str]:
    """The parts of a query that have a value."""
    return {name: str(value) for name, value in query.items() if value not in (None, "")}


def _trusting(home: Home) -> ssl.SSLContext | bool:
    certificate = home.config().api.certificate
    if certificate is None:
        return True
    context = ssl.create_default_context(cafile=str(home.root / certificate))
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False  # this one certificate is trusted, whatever name it is for
    return context


def _application(home: Home, store: Store) -> FastAPI:
    """The routes over a directory in which no coordinator runs."""

    def no_context(record: FederationRecord) -> NoReturn:
        raise AssertionError(f"{record.id} is not run by a command")

    events = coordinator_log(home.events_file, store.events)
    application = FastAPI()
    add_api(application, home, Coordinator(store, artifacts_of(home), events, no_context))
    return application


def _refuse(answer: httpx.Response) -> NoReturn:
    """Raise the error that an answer stands for."""
    try:
        problem = answer.json()
        message = "\n  ".join([str(problem["detail"]), *map(str, problem.get("problems", ()))])
    except (ValueError, KeyError, TypeError):
        message = (
            f"{answer.url} answered {answer.status_code} with something else than a problem; is this a coordinator?"
        )
    if answer.status_code in REFUSED:
        raise AccessError(message)
    if answer.status_code == 404:
        raise NotFoundError(message)
    if answer.status_code == 429 or answer.status_code >= 500:
        raise RequestFailedError(message)
    raise RequestError(message, exit_code=EXISTS if EXISTS_KIND in answer.text else None)
