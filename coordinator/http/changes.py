"""What every request that changes something passes: one answer per Idempotency-Key, and a line in the audit log.

`ChangeRoute` is the route class of such routes: `APIRouter(route_class=ChangeRoute)`.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import parse_qs

from cryptography.fernet import Fernet
from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from coordinator.http.access import FORM_FIELD, FORM_MEDIA, READING, access_of, address_of, unauthorised
from coordinator.http.problems import MEDIA_TYPE, ProblemError, problem_of
from coordinator.http.refusals import CountedEvent
from coordinator.members.api_tokens import Identity
from coordinator.storage.api_store import ApiStore, StoredAnswer
from fedcg.event_log import EventLog

KEY_HEADER = "Idempotency-Key"
KEEP_S = 86_400.0
MAX_CHANGED = 4000
"""Characters of a request's content that stand in the audit log."""
UNSTORED = (401, 403, 429)
"""Answers that say nothing about the change itself: a repeated request is tried again."""
SECRET_FIELDS = (FORM_FIELD, "token", "secret", "password")
_KEY = re.compile(r"[!-~]{1,255}")

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class Changes:
    """The audit log, and the answers to requests that named a key.

    Args:
        store: where answers are kept, encrypted: the answer to a new token holds it.
        seal: encrypts them.
        audit: the audit log.
        events: the event log, for requests that nobody valid made.
    """

    def __init__(self, store: ApiStore, seal: Fernet, audit: EventLog, events: EventLog) -> None:
        self._store = store
        self._seal = seal
        self._audit = audit
        self._refused = CountedEvent(events, "api_refused")
        self._open: set[tuple[str, str]] = set()

    async def make(self, request: Request, handler: Handler) -> Response:
        """Answer a request that changes something."""
        body = b""
        try:
            body = await request.body()
            identity = await access_of(request).identify(request)
            if identity is None:
                self._refused.count(address=address_of(request))
                raise unauthorised()  # noqa: TRY301 - answered as every other error
            request.state.identity = identity
            response = await self._once(request, identity, body, handler)
        except Exception as error:  # noqa: BLE001 - every error is an answer, and the answer is audited
            response = problem_of(error).answer(request.url.path)
        known = getattr(request.state, "identity", None)
        if known is not None:
            await run_in_threadpool(self._note, request, known, body, response)
        return response

    async def _once(self, request: Request, identity: Identity, body: bytes, handler: Handler) -> Response:
        key = request.headers.get(KEY_HEADER)
        if key is None:
            return await self._answer(request, handler)
        if not _KEY.fullmatch(key):
            raise ProblemError(422, f"{KEY_HEADER}: use 1 to 255 printable ASCII characters, e.g. a UUID")
        content = f"{request.method}\0{request.url.path}\0{request.url.query}\0".encode() + body
        digest, place = hashlib.sha256(content).hexdigest(), (identity.token_id, key)
        if place in self._open:
            raise ProblemError(409, f"a request with the same {KEY_HEADER} is being answered; ask again")
        self._open.add(place)
        try:
            earlier = await run_in_threadpool(self._store.answer, identity.token_id, key)
            if earlier is not None:
                return self._repeated(earlier, digest)
            response = await self._answer(request, handler)
            if response.status_code < 500 and response.status_code not in UNSTORED:
                sealed = self._seal.encrypt(bytes(response.body)).decode()
                kept = StoredAnswer(key, identity.token_id, digest, response.status_code, sealed, time.time())
                await run_in_threadpool(self._store.add_answer, kept, KEEP_S)
        finally:
            self._open.discard(place)
        return response

    async def _answer(self, request: Request, handler: Handler) -> Response:
        try:
            return await handler(request)
        except Exception as error:  # noqa: BLE001 - an answer, which is stored like any other
            return problem_of(error).answer(request.url.path)

    def _repeated(self, earlier: StoredAnswer, digest: str) -> Response:
        if earlier.request_hash != digest:
            raise ProblemError(409, f"this {KEY_HEADER} was used for another request; choose a new key")
        media = "application/json" if earlier.status < 400 else MEDIA_TYPE
        body = self._seal.decrypt(earlier.body.encode())
        return Response(body, earlier.status, {"Idempotency-Replayed": "true"}, media)

    def _note(self, request: Request, identity: Identity, body: bytes, response: Response) -> None:
        self._audit.write(
            "change",
            identity=identity.name,
            role=identity.role.value,
            token=identity.token_id,
            address=address_of(request),
            route=f"{request.method} {request.url.path}",
            changed=_content(body, request.headers.get("Content-Type", "")),
            outcome=response.status_code,
            repeated="Idempotency-Replayed" in response.headers,
        )


class ChangeRoute(APIRoute):
    """A route whose changes are made once per key, and audited; reading passes through."""

    def get_route_handler(self) -> Handler:
        """The handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if request.method in READING:
                return await handler(request)
            changes: Changes = request.app.state.changes
            return await changes.make(request, handler)

        return handle


class ViewRoute(APIRoute):
    """A route that is read: its answers have an ETag, and one that is unchanged is not sent again."""

    def get_route_handler(self) -> Handler:
        """The handler of a request."""
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            response = await handler(request)
            if response.status_code != 200:
                return response
            tag = response.headers.setdefault("ETag", etag_of(bytes(response.body)))
            known = [one.strip().removeprefix("W/") for one in request.headers.get("If-None-Match", "").split(",")]
            if tag in known or known == ["*"]:
                kept = {name: response.headers[name] for name in ("ETag", "Link") if name in response.headers}
                return Response(None, 304, kept)
            return response

        return handle


def etag_of(content: bytes) -> str:
    """The ETag of a view."""
    return f'"{hashlib.sha256(content).hexdigest()[:32]}"'


def _content(body: bytes, media: str) -> str:
    """The content of a request, without secrets, in at most `MAX_CHANGED` characters."""
    text = body[: 16 * MAX_CHANGED].decode(errors="replace")
    try:
        values = (
            {name: given[-1] for name, given in parse_qs(text, max_num_fields=1000).items()}
            if media.partition(";")[0].strip().lower() == FORM_MEDIA
            else json.loads(text or "{}")
        )
    except ValueError:
        return "(not readable)"
    if isinstance(values, dict):
        values = {name: "(hidden)" if name in SECRET_FIELDS else value for name, value in values.items()}
    return json.dumps(values)[:MAX_CHANGED]
