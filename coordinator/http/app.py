"""The FastAPI application: it runs the service on a thread of its own, and its routes are the read-only interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI

from coordinator.http.operator_api import router
from coordinator.service.service import TICK_S, Service
from coordinator.service.service_context import ServiceContext
from fedcg.disk_errors import advice_for

THREADS = 4
"""Threads that read the database for HTTP requests; the service uses the other connections."""

log = logging.getLogger(__name__)

RequestExit = Callable[[int], None]
Beside = Callable[[Service], AbstractAsyncContextManager[None]]


def create_app(
    context: ServiceContext,
    request_exit: RequestExit,
    *,
    exit_when_finished: bool,
    beside: Beside,
) -> FastAPI:
    """The application of one coordinator.

    Args:
        context: the dependencies of the service.
        request_exit: called to end the process with an exit code, when the service fails or is finished.
        exit_when_finished: end after the last round, once the devices have left (or a minute later).
        beside: runs beside the service, for as long as it works.
    """

    @asynccontextmanager
    async def life(application: FastAPI) -> AsyncIterator[None]:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "service")
        service = await loop.run_in_executor(thread, _started, context)
        application.state.service = service
        application.state.context = context
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        work = loop.run_in_executor(thread, service.run)
        work.add_done_callback(partial(_ended, request_exit, context.artifacts.root))
        leaving = asyncio.create_task(_leave(service, request_exit)) if exit_when_finished else None
        try:
            async with beside(service):
                yield
        finally:
            if leaving is not None:
                leaving.cancel()
            service.stop()
            await asyncio.wait([work])
            await loop.run_in_executor(thread, service.close)

    application = FastAPI(
        title="FedCG Edge coordinator",
        version=version("fedcg-edge"),
        lifespan=life,
        docs_url=None,  # the pages would load scripts from elsewhere; /openapi.json is here
        redoc_url=None,
    )
    application.include_router(router)
    return application


def _started(context: ServiceContext) -> Service:
    service = Service(context)
    service.start()
    return service


async def _leave(service: Service, request_exit: RequestExit) -> None:
    while not service.finished_and_left.is_set():  # noqa: ASYNC110 - it is set on the service's thread
        await asyncio.sleep(TICK_S)
    request_exit(0)


def _ended(request_exit: RequestExit, directory: Path, work: asyncio.Future[None]) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None:
        advice = f" {advice_for(error, directory)} first: {error}" if isinstance(error, OSError) else ""
        log.critical(
            "the coordinator failed and ends; after a restart it goes on with the same attempt.%s",
            advice,
            exc_info=None if advice else error,
        )
        request_exit(1)
