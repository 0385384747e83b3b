"""The FastAPI application: it runs the federations, each on a thread of its own, and its routes are the operator's interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI

from coordinator.http import facts_api
from coordinator.http.access import Access
from coordinator.http.operator_api import health, router
from coordinator.http.problems import answer_problems
from coordinator.members.api_tokens import ApiTokens
from coordinator.paths import Home
from coordinator.service.coordinator import Coordinator
from coordinator.service.service import TICK_S
from fedcg.disk_errors import advice_for

THREADS = 4
"""Threads that read the database for HTTP requests; the service uses the other connections."""

log = logging.getLogger(__name__)

RequestExit = Callable[[int], None]
Beside = Callable[[Coordinator], AbstractAsyncContextManager[None]]


def create_app(
    home: Home,
    coordinator: Coordinator,
    request_exit: RequestExit,
    *,
    exit_when_finished: bool,
    beside: Beside,
) -> FastAPI:
    """The application of one coordinator.

    Args:
        home: its directory.
        coordinator: runs the federations; not yet started.
        request_exit: called to end the process with an exit code, when a service fails or all are finished.
        exit_when_finished: end after the last round of every federation, once the devices have left (or a minute later).
        beside: runs beside the federations, for as long as they work.
    """

    @asynccontextmanager
    async def life(application: FastAPI) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS

        def failed(error: BaseException) -> None:
            loop.call_soon_threadsafe(_failed, request_exit, home.artifacts, error)

        await asyncio.to_thread(coordinator.start, failed)
        leaving = asyncio.create_task(_leave(coordinator, request_exit)) if exit_when_finished else None
        try:
            async with beside(coordinator):
                yield
        finally:
            if leaving is not None:
                leaving.cancel()
            await asyncio.to_thread(coordinator.close)

    application = FastAPI(
        title="FedCG Edge coordinator",
        version=version("fedcg-edge"),
        lifespan=life,
        docs_url=None,  # the pages would load scripts from elsewhere; /openapi.json is here
        redoc_url=None,
    )
    application.state.coordinator = coordinator
    application.state.home = home
    application.state.access = Access(ApiTokens(coordinator.store.api), home.secret())
    answer_problems(application)
    application.include_router(health)
    application.include_router(facts_api.router)
    application.include_router(router)
    return application


async def _leave(coordinator: Coordinator, request_exit: RequestExit) -> None:
    while not coordinator.is_finished:  # noqa: ASYNC110 - the services' threads change it
        await asyncio.sleep(TICK_S)
    request_exit(0)


def _failed(request_exit: RequestExit, directory: Path, error: BaseException) -> None:
    advice = f" {advice_for(error, directory)} first: {error}" if isinstance(error, OSError) else ""
    log.critical(
        "the coordinator failed and ends; after a restart it goes on with the same attempt.%s",
        advice,
        exc_info=None if advice else error,
    )
    request_exit(1)
