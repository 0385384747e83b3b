"""Errors of the HTTP interface as `application/problem+json` (RFC 9457), whatever raised them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from coordinator.errors import (
    ConfigError,
    CoordinatorError,
    EnrolmentError,
    HomeError,
    NotFoundError,
    PlanError,
    SteeringError,
)

MEDIA_TYPE = "application/problem+json"
MAX_PROBLEMS = 100

log = logging.getLogger(__name__)


class ProblemError(Exception):
    """A request that is refused.

    Attributes:
        status: of the answer.
        detail: for the person who asked: what is wrong, and what to do.
        problems: one line for each error of the content, when there are several.
        headers: of the answer.
    """

    def __init__(
        self, status: int, detail: str, *, problems: Sequence[str] = (), headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.problems = tuple(problems)
        self.headers = dict(headers or {})


def problem(
    status: int,
    detail: str,
    instance: str,
    problems: Sequence[str] = (),
    headers: Mapping[str, str] | None = None,
) -> Response:
    """An answer that says what is wrong; `instance` is the path that was asked for."""
    body: dict[str, Any] = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "instance": instance,
    }
    if problems:
        body["problems"] = list(problems[:MAX_PROBLEMS])
    return JSONResponse(body, status, dict(headers or {}), MEDIA_TYPE)


def problem_of(error: CoordinatorError) -> ProblemError:
    """The answer to a request that the coordinator itself refused."""
    first, *more = str(error).split("\n  ")  # as `fedcg.config_file.listed` lays out several
    if isinstance(error, NotFoundError):
        return ProblemError(404, first)
    if isinstance(error, PlanError):
        return ProblemError(422, first, problems=more)
    if isinstance(error, SteeringError):
        return ProblemError(422 if more else 409, first, problems=more)
    if isinstance(error, (EnrolmentError, ConfigError, HomeError)):
        return ProblemError(409, first, problems=more)
    log.error("a request failed: %s", error, exc_info=error)
    return ProblemError(500, "the coordinator could not do it; its log has the reason")


def answer_problems(application: FastAPI) -> None:
    """Let an application answer every error with a problem."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, ProblemError)
        return problem(error.status, error.detail, request.url.path, error.problems, error.headers)

    async def coordinator_refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, CoordinatorError)
        return await refused(request, problem_of(error))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        found = [f"{'.'.join(str(step) for step in one['loc'])}: {one['msg']}" for one in error.errors()]
        detail = "the request does not fit its schema; /openapi.json has it"
        return problem(422, detail, request.url.path, [line[:300] for line in found])

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, str(error.detail), request.url.path, headers=error.headers)

    async def failed(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return problem(500, "the coordinator could not do it; its log has the reason", request.url.path)

    application.add_exception_handler(ProblemError, refused)
    application.add_exception_handler(CoordinatorError, coordinator_refused)
    application.add_exception_handler(RequestValidationError, invalid)
    application.add_exception_handler(HTTPException, http_error)
    application.add_exception_handler(Exception, failed)
