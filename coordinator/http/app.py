"""The FastAPI application: its lifespan is the service's life, its routes are the read-only interface."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio.to_thread
from fastapi import FastAPI

from coordinator.http.operator_api import router
from coordinator.service.service import Service, start_service
from coordinator.service.service_context import Setup
from fedcg.disk_errors import advice_for

THREADS = 4
"""That read the database for HTTP requests: the rest of its connections is the round engine's."""

log = logging.getLogger(__name__)

RequestExit = Callable[[int], None]
Beside = Callable[[Service], AbstractAsyncContextManager[None]]


def create_app(
    setup: Setup,
    request_exit: RequestExit,
    *,
    exit_when_finished: bool = False,
    beside: Beside = lambda service: nullcontext(),
) -> FastAPI:
    """The application of one coordinator.

    Args:
        setup: what the service is given.
        request_exit: asked to end the process with an exit code, when the service fails or has nothing more to do.
        exit_when_finished: end after the last round, once the devices have left (or a minute later).
        beside: runs beside the service, for as long as it works.
    """

    @asynccontextmanager
    async def life(application: FastAPI) -> AsyncIterator[None]:
        service = await start_service(setup)
        application.state.service = service
        application.state.setup = setup
        anyio.to_thread.current_default_thread_limiter().total_tokens = THREADS
        work = asyncio.create_task(service.run(), name="service")
        work.add_done_callback(partial(_ended, request_exit, setup.artifacts.root))
        leaving = asyncio.create_task(_leave(service, request_exit)) if exit_when_finished else None
        try:
            async with beside(service):
                yield
        finally:
            if leaving is not None:
                leaving.cancel()
            service.stop()
            await asyncio.wait([work])
            await service.close()

    application = FastAPI(
        title="FedCG Edge coordinator",
        version=version("fedcg-edge"),
        lifespan=life,
        docs_url=None,  # the pages would load scripts from elsewhere; /openapi.json is here
        redoc_url=None,
    )
    application.include_router(router)
    return application


async def _leave(service: Service, request_exit: RequestExit) -> None:
    await service.finished_and_left.wait()
    request_exit(0)


def _ended(request_exit: RequestExit, directory: Path, work: asyncio.Task[None]) -> None:
    error = None if work.cancelled() else work.exception()
    if error is not None:
        told = f" {advice_for(error, directory)} first: {error}" if isinstance(error, OSError) else ""
        log.critical(
            "the coordinator fails and ends; started again it goes on with the same attempt.%s",
            told,
            exc_info=None if told else error,
        )
        request_exit(1)
