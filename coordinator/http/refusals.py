"""Refused requests: answers of the operators' interface as `application/problem+json` (RFC 9457), answers of the device listeners, limits on refusals, and counted events."""

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from coordinator import errors
from coordinator.token_buckets import Buckets, Rate
from fedcg.errors import EXISTS, NOT_FOUND, in_words
from fedcg.event_log import EventLog
from fedcg.listening import network_of
from fedcg.text_output import wrong_value
from fedcg.wire.messages.enrolment_messages import Refusal

EVENT_EVERY_S = 10.0
MAX_REASON = 600


def refusal(status: int, reason: str, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with the reason. It closes the connection, because a body may be unread."""
    return Response(
        Refusal(error=reason[:MAX_REASON]).model_dump_json(),
        status,
        {**(headers or {}), "Connection": "close"},
        "application/json",
    )


class CountedEvent:
    """An event that anyone can trigger. It is written at most once in ten seconds, with a count.

    Args:
        events: the event log.
        name: the event's name.
        clock: monotonic seconds.
    """

    def __init__(self, events: EventLog, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._events = events
        self._name = name
        self._lines: Buckets[None] = Buckets(Rate(1, 1 / EVENT_EVERY_S), clock)
        self._count = 0

    def count(self, **values: str | None) -> None:
        """Count an occurrence, and write the event when it is due."""
        self._count += 1
        if self._lines.take(None):
            self._events.write(self._name, refused=self._count, **values)


PER_ADDRESS = Rate(10, 1 / 6)
ALL = Rate(120, 2.0)


class FailureLimits:
    """Counts refusals: an address with too many refusals must wait. Successes do not count, so roll-outs are never slowed.

    Args:
        clock: monotonic seconds.
        per_address: limit of one IPv4 address, or one IPv6 network of 64 bits.
        in_all: limit of all addresses together.
    """

    def __init__(self, clock: Callable[[], float], per_address: Rate = PER_ADDRESS, in_all: Rate = ALL) -> None:
        self._addresses: Buckets[str] = Buckets(per_address, clock)
        self._all: Buckets[None] = Buckets(in_all, clock)

    def wait_s(self, address: str) -> float:
        """Seconds until this address may send a request; 0 if it may now."""
        return max(self._all.wait_s(None), self._addresses.wait_s(network_of(address)))

    def refused(self, address: str) -> None:
        """Count a refusal."""
        self._addresses.take(network_of(address))
        self._all.take(None)


MEDIA_TYPE = "application/problem+json"
MAX_PROBLEMS = 100
ANY_KIND, EXISTS_KIND, USED_KIND = "about:blank", "urn:fedcg:exists", "urn:fedcg:used-key"
Answer = Callable[[Request, Exception], Awaitable[Response]]
UNFORESEEN = 500
"""The status of an unexpected error. `fedcg.listening` logs it, with a limit per peer."""


class Problem(BaseModel):
    """The error of a request and the next step; `problems` has one line for each error in its content."""

    type: str = ANY_KIND
    title: str
    status: int
    detail: str
    instance: str
    problems: list[str] | None = None


PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"description": phrase, "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}}}
    for code, phrase in {
        400: "The request can't be read",
        401: "No valid token",
        403: "The role is too low",
        404: "Not found",
        409: "Not possible in the present state",
        412: "Changed since it was read",
        413: "The body is too large",
        422: "The content is invalid",
        429: "Too many requests",
    }.items()
}
"""Error responses of all routes, for the OpenAPI document."""


class ProblemError(Exception):
    """A refused request.

    Attributes:
        status: HTTP status of the answer.
        detail: the error and the next step, for the user.
        problems: one line for each error in the content, if there are several.
        headers: headers of the answer.
        kind: `type` of the answer.
    """

    def __init__(
        self,
        status: int,
        detail: str,
        *,
        problems: Sequence[str] = (),
        headers: Mapping[str, str] | None = None,
        kind: str = ANY_KIND,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = in_words(detail)
        self.problems = tuple(problems)
        self.kind = kind
        self.headers = dict(headers or {})

    def answer(self, instance: str) -> Response:
        """The answer to a request for the path `instance`."""
        body = Problem(
            type=self.kind,
            title=HTTPStatus(self.status).phrase,
            status=self.status,
            detail=self.detail,
            instance=instance,
            problems=list(self.problems[:MAX_PROBLEMS]) or None,
        )
        return JSONResponse(body.model_dump(exclude_none=True), self.status, self.headers, MEDIA_TYPE)


def too_many(what: str, wait_s: float) -> ProblemError:
    """The answer to a request above a limit, with the time to wait."""
    seconds = int(wait_s) + 1
    return ProblemError(429, f"too many {what}; try again in {seconds} s", headers={"Retry-After": str(seconds)})


def problem_of(error: Exception) -> ProblemError:
    """The answer to a failed request. The text of an unexpected error is not revealed."""
    if isinstance(error, ProblemError):
        return error
    first, *more = str(error).split("\n  ")  # the layout of `fedcg.config_file.listed`
    code = error.exit_code if isinstance(error, errors.CoordinatorError) else None
    if code == NOT_FOUND:
        return ProblemError(404, first)
    if code == EXISTS:
        return ProblemError(409, first, problems=more, kind=EXISTS_KIND)
    if isinstance(error, errors.StoppingError):
        return ProblemError(503, first)
    if isinstance(error, errors.PlanError) or (more and isinstance(error, errors.SteeringError)):
        return ProblemError(422, first, problems=more)
    if isinstance(error, (errors.SteeringError, errors.EnrolmentError, errors.ConfigError, errors.HomeError)):
        return ProblemError(409, first, problems=more)
    if isinstance(error, RequestValidationError):
        found = [f"{'.'.join(str(step) for step in one['loc'])}: {wrong_value(one)}"[:300] for one in error.errors()]
        return ProblemError(422, "the request does not match its schema; see /openapi.json", problems=found)
    if isinstance(error, HTTPException):
        return ProblemError(error.status_code, str(error.detail), headers=error.headers)
    return ProblemError(UNFORESEEN, "the coordinator failed to handle the request; its log has the reason")


async def as_problem(request: Request, error: Exception) -> Response:
    """The problem details for a failed request."""
    return problem_of(error).answer(request.url.path)


def answer_problems(application: FastAPI, answer: Answer = as_problem) -> None:
    """Make an application answer every error with problem details, or with another kind of answer."""
    for kind in (ProblemError, errors.CoordinatorError, RequestValidationError, HTTPException, Exception):
        application.add_exception_handler(kind, answer)
