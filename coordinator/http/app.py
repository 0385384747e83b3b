"""The FastAPI application: runs the federations, each on its own thread, and serves the operators' interface."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import anyio
import anyio.to_thread
from fastapi import FastAPI
from sqlalchemy.exc import DBAPIError
from starlette.middleware.gzip import GZipMiddleware

from coordinator.errors import StoreError
from coordinator.http import event_stream, operator_api
from coordinator.http.access import Access, Guard
from coordinator.http.changes import AuditLog, Changes
from coordinator.http.oidc import Oidc
from coordinator.http.refusals import answer_problems
from coordinator.members.api_tokens import ApiTokens
from coordinator.notifications import Notifier
from coordinator.operations.operations import Operations
from coordinator.paths import Home
from coordinator.service.coordinator import Coordinator
from coordinator.service.service import TICK_S
from coordinator.storage.database import database_of, explained, unusable
from fedcg.errors import FAILED, FedcgError
from fedcg.files import advice_for

THREADS = 4
"""Threads that read the database for HTTP requests; the service uses the other connections."""

COMPRESSION = 4
"""Gzip level: a page of 1,000 devices shrinks to a tenth in a millisecond or two; higher levels gain little."""

log = logging.getLogger(__name__)

RequestExit = Callable[[int], None]
Beside = Callable[[Coordinator], AbstractAsyncContextManager[None]]


def create_app(
    home: Home,
    coordinator: Coordinator,
    request_exit: RequestExit,
    *,
    until_finished: bool,
    beside: Beside,
    proxy: str | None = None,
) -> FastAPI:
    """The application of one coordinator.

    Args:
        home: its directory.
        coordinator: runs the federations; not yet started.
        request_exit: called with an exit code to end the process, when a service fails or all are finished.
        until_finished: end after the last round of every federation, once the devices have left (or a minute later).
        beside: context that stays open while the federations run.
        proxy: the address of the reverse proxy in front.
    """
    database = database_of(home)

    @asynccontextmanager
    async def life(application: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS

        def failed(error: BaseException) -> None:
            shown = unusable(database, error) if isinstance(error, DBAPIError) else error
            loop.call_soon_threadsafe(_failed, request_exit, home.artifacts, shown)

        async with AsyncExitStack() as running:
            running.push_async_callback(asyncio.to_thread, coordinator.close)
            try:
                with explained(home):
                    await asyncio.to_thread(coordinator.start, failed)
                if until_finished:
                    running.callback(asyncio.create_task(_leave(coordinator, request_exit)).cancel)
                await running.enter_async_context(beside(coordinator))
            except (FedcgError, OSError) as error:  # such as a damaged key or a missing artifact
                application.state.failure = error
                request_exit(FAILED)
            yield

    application = FastAPI(
        title="FedCG Edge coordinator",
        version=version("fedcg-edge"),
        lifespan=life,
        openapi_url=None,  # `operator_api` serves it to token holders; FastAPI's pages would load scripts from other hosts
    )
    application.state.failure = None
    application.add_middleware(GZipMiddleware, compresslevel=COMPRESSION)  # does not compress event streams
    application.add_middleware(Guard, proxy=proxy)
    add_api(application, home, coordinator)
    return application


ROUTERS = (
    operator_api.health,
    operator_api.plain,
    operator_api.router,
    operator_api.operating,
    operator_api.admin,
    event_stream.router,
    operator_api.steering,
    operator_api.steering_admin,
    operator_api.own,
)
"""The routes of the operator API."""


def add_api(application: FastAPI, home: Home, coordinator: Coordinator) -> None:
    """Add the operators' interface and everything that its routes need.

    Args:
        application: receives the routes.
        home: the coordinator's directory.
        coordinator: runs the federations, or is never started.
    """
    store = coordinator.store
    state = application.state
    state.coordinator = coordinator
    state.home = home
    config = home.config()
    oidc = Oidc(config.oidc, home.password("oidc", config.oidc.client_secret_file), home.secret())
    state.access = Access(ApiTokens(store.api), home.secret(), kept=home.sessions, oidc=oidc)
    state.events = event_stream.EventStream(store.events)
    state.operations = Operations(home, store, coordinator.events, coordinator.follow)
    state.notifier = Notifier.of(home)
    state.waiting = anyio.CapacityLimiter(1)  # the thread that waits for the members' lock
    state.creating = anyio.CapacityLimiter(1)  # the thread that waits for a new federation's weights
    state.sizing = anyio.CapacityLimiter(1)  # the thread that waits for the sizes of networks
    audit = AuditLog(home.audit_file, config.storage.audit_days)
    state.changes = Changes(store.api, audit, coordinator.events)
    answer_problems(application)
    for router in ROUTERS:
        application.include_router(router)


async def _leave(coordinator: Coordinator, request_exit: RequestExit) -> None:
    while not coordinator.is_finished:  # noqa: ASYNC110 - other threads change it
        await asyncio.sleep(TICK_S)
    request_exit(0)


def _failed(request_exit: RequestExit, directory: Path, error: BaseException) -> None:
    advice = f" {advice_for(error, directory)} first: {error}" if isinstance(error, OSError) else ""
    advice = f" {error}" if isinstance(error, StoreError) else advice
    log.critical(
        "the coordinator failed and exits; after a restart it resumes the same attempt.%s",
        advice,
        exc_info=None if advice else error,
    )
    request_exit(1)
