"""Access control for requests: first address, rate and size, then identity and role.

Programs send a bearer token; the page uses a session cookie.

A route declares its role with `identity: Annotated[Identity, Depends(require(Role.OPERATOR))]`.
"""

import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qs

from fastapi import Depends, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPBearer
from pydantic import BaseModel, TypeAdapter
from starlette.datastructures import MutableHeaders

from coordinator.config import LOOPBACK_HOSTS, OidcSettings
from coordinator.http.oidc import FLOW_COOKIE, Oidc
from coordinator.http.refusals import FailureLimits, ProblemError, too_many
from coordinator.members.api_tokens import ApiTokens, Identity, Role
from coordinator.token_buckets import Buckets, Rate
from fedcg.files import replace_durably
from fedcg.listening import Application, network_of

__all__ = ["ACTION_HEADER", "COOKIE", "FORM_FIELD", "Access", "Identity", "Role", "require"]

COOKIE = "fedcg_session"
ACTION_HEADER = "X-FedCG"
"""A change that is identified by the cookie needs this header with the value 1. Other sites can't add it."""
FORM_FIELD = "form_token"
"""A form without JavaScript sends this field with `Access.form_token` instead."""
SESSION_S = 12 * 3600.0
MAX_SESSIONS = 20
"""Open sessions of one account; a further one ends the oldest."""
MAX_FIELDS = 1100
READING = ("GET", "HEAD", "OPTIONS")
PER_TOKEN = Rate(200, 50.0)
BEARER = HTTPBearer(auto_error=False, description="A token from `fedcg coordinator token create`.")


class Session(BaseModel):
    """An open session of the page.

    Attributes:
        id: does not reveal its cookie.
        who: name and role at sign-in. The `token_id` of a person from an OpenID Connect provider is the issuer, #, and the id there.
        groups: the person's groups at the provider that had a role at sign-in.
        opened_at, ends_at: unix times.
        address: address of the last request.
    """

    id: str
    who: Identity
    groups: tuple[str, ...]
    opened_at: float
    ends_at: float
    address: str


_SESSIONS = TypeAdapter(dict[str, Session])


class Access:
    """Identifies requests.

    Args:
        tokens: the API tokens.
        secret: signs the forms of the page.
        per_token: rate limit of one token.
        clock: unix time, for sessions.
        monotonic: seconds, for the limits.
        kept: the file of open sessions, so that they survive a restart. It contains only digests of their cookies.
        oidc: signs people in with an OpenID Connect provider; off by default.
    """

    def __init__(
        self,
        tokens: ApiTokens,
        secret: bytes,
        per_token: Rate = PER_TOKEN,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        kept: Path | None = None,
        oidc: Oidc | None = None,
    ) -> None:
        self.tokens, self.oidc = tokens, oidc or Oidc(OidcSettings(), "", b"")
        self._key = hmac.digest(secret, b"forms of the coordinator's page", "sha256")
        self._kept, self._keeping = kept, threading.Lock()
        self._sessions: dict[str, Session] = {}
        if kept is not None:
            with suppress(OSError, ValueError):  # missing or damaged: all sessions have ended
                self._sessions = _SESSIONS.validate_json(kept.read_bytes())
        self._clock = clock
        self._failures = FailureLimits(monotonic)
        self._requests: Buckets[str] = Buckets(per_token, monotonic)

    async def identify(self, request: Request) -> Identity | None:
        """The identity behind a request, or None without valid credentials.

        Raises:
            ProblemError: 429, too many refused requests from its address, or too many requests of its token; 403, a change with only
                the cookie, which another site could have caused.
        """
        bearer, session = request.headers.get("Authorization"), request.cookies.get(COOKIE)
        if not bearer and session is None:
            return None
        identity = await self.known(request)
        if identity is None:
            self._count_failure(request)
            return None
        if not self._requests.take(identity.token_id):
            raise too_many("requests", self._requests.wait_s(identity.token_id))
        if not bearer and request.method not in READING:
            await self._check_own_page(request, session or "")
        return identity

    async def known(self, request: Request) -> Identity | None:
        """The identity behind a request, without rate limits. Long answers check it repeatedly."""
        bearer = request.headers.get("Authorization", "")
        if bearer:
            scheme, _, text = bearer.partition(" ")
            return await run_in_threadpool(self.tokens.check, text.strip()) if scheme.lower() == "bearer" else None
        session = self._open_sessions().get(session_id(request))
        if session is None:
            return None
        session.address = address_of(request)
        return await run_in_threadpool(self._identity_of, session)

    def _identity_of(self, session: Session) -> Identity | None:
        """The identity of a session; None if its token or the role of its groups is no longer valid."""
        if "#" not in session.who.token_id:
            return self.tokens.of_session(session.who.token_id)
        role = self.oidc.role_of(session.who.token_id, session.groups)
        return None if role is None else replace(session.who, role=role)

    async def sign_in(self, text: str, request: Request) -> str:
        """Open a session of the page with a token.

        Returns:
            The value for `set_session`.

        Raises:
            ProblemError: 401, the token is not valid; 429, too many refused requests from the address.
        """
        identity = await run_in_threadpool(self.tokens.check, text.strip())
        if identity is None:
            self._count_failure(request)
            raise ProblemError(401, "the token is not valid; create one with `fedcg coordinator token create`")
        return await run_in_threadpool(self.open_session, identity, address_of(request))

    async def finish_oidc(self, request: Request) -> tuple[str, str]:
        """Open a session after the redirect of the OpenID Connect provider.

        Returns:
            The value for `set_session`, and the path to show.

        Raises:
            ProblemError: the errors of `Oidc.finish`.
        """
        who, groups, to = await self.oidc.finish(request.cookies.get(FLOW_COOKIE, ""), request.query_params)
        return await run_in_threadpool(self.open_session, who, address_of(request), groups), to

    def open_session(self, who: Identity, address: str = "", groups: tuple[str, ...] = ()) -> str:
        """Open a session; returns the value for `set_session`."""
        own = [key for key, each in list(self._sessions.items()) if each.who.token_id == who.token_id]
        for key in own[: max(0, len(own) + 1 - MAX_SESSIONS)]:
            self._sessions.pop(key, None)
        value, now = secrets.token_hex(32), self._clock()
        times = {"opened_at": now, "ends_at": now + SESSION_S}
        self._sessions[_digest(value)] = Session(id=_digest(value), who=who, groups=groups, address=address, **times)
        self._keep()
        return value

    async def sign_out(self, request: Request) -> None:
        """End the session of a request in all browsers that have its cookie."""
        self._sessions.pop(session_id(request), None)
        await run_in_threadpool(self._keep)

    def list_sessions(self, own: Identity) -> list[Session]:
        """The open sessions that an identity may see and end, newest first: its own, or all as an admin."""
        every = reversed(self._open_sessions().values())
        found = [each for each in every if own.role is Role.ADMIN or own.token_id == each.who.token_id]
        return [each.model_copy(update={"who": who}) for each in found if (who := self._identity_of(each)) is not None]

    def end_session(self, session: str, own: Identity) -> Session:
        """End one of these sessions.

        Raises:
            ProblemError: 404, none of them has this id.
        """
        found = next((each for each in self.list_sessions(own) if each.id == session), None)
        if found is None:
            raise ProblemError(404, f"no session {session[:80]!r} is open; `fedcg coordinator session list` lists them")
        self._sessions.pop(session, None)
        self._keep()
        return found

    def _open_sessions(self) -> dict[str, Session]:
        now = self._clock()
        return {key: each for key, each in list(self._sessions.items()) if now < each.ends_at}

    def _keep(self) -> None:
        """Save the open sessions. If writing fails, the file is deleted: a restart then ends all sessions and revives none."""
        if self._kept is not None:
            with self._keeping:
                try:
                    replace_durably(self._kept, _SESSIONS.dump_json(self._open_sessions()))
                except OSError:
                    with suppress(OSError):
                        self._kept.unlink(missing_ok=True)

    def form_token(self, session: str) -> str:
        """The value of the hidden field `FORM_FIELD` in the forms of the session with this cookie."""
        return hmac.new(self._key, session.encode(), hashlib.sha256).hexdigest()

    async def _check_own_page(self, request: Request, session: str) -> None:
        if request.headers.get(ACTION_HEADER) == "1":
            return
        given = ""
        if is_form(request.headers.get("Content-Type", "")):
            given = form_fields(await request.body()).get(FORM_FIELD, "")
        if not hmac.compare_digest(self.form_token(session).encode(), given.encode()):
            raise ProblemError(
                403, f"a change with the page's cookie needs the header `{ACTION_HEADER}: 1` or the form's hidden token"
            )

    def _count_failure(self, request: Request) -> None:
        """Count a failure. Only failures are limited, so one program's wrong token does not lock out others at its address."""
        address = address_of(request)
        wait_s = self._failures.wait_s(address)
        if wait_s > 0:
            raise too_many("refused requests", wait_s)
        self._failures.refused(address)


def set_session(response: Response, value: str, *, secure: bool) -> None:
    """Set the session cookie; `secure` if the page is served over HTTPS."""
    response.set_cookie(
        COOKIE, value, max_age=int(SESSION_S), path="/", secure=secure, httponly=True, samesite="strict"
    )


def end_session(response: Response) -> None:
    """Delete the session cookie."""
    response.delete_cookie(COOKIE, path="/", httponly=True, samesite="strict")


def unauthorised() -> ProblemError:
    """The answer to a request without a valid token or session."""
    return ProblemError(
        401,
        "send a valid token as `Authorization: Bearer fcga_...`; create one with `fedcg coordinator token create`",
        headers={"WWW-Authenticate": "Bearer"},
    )


def access_of(request: Request) -> Access:
    """The `Access` of the application that serves a request."""
    access: Access = request.app.state.access
    return access


def address_of(request: Request) -> str:
    """The client's address of a request."""
    return "unknown" if request.client is None else request.client.host


def is_form(media: str) -> bool:
    """Whether a content type is that of a form."""
    return media.partition(";")[0].strip().lower() == "application/x-www-form-urlencoded"


def form_fields(body: bytes) -> dict[str, str]:
    """The fields of a form, each with its first value.

    Raises:
        ProblemError: 400, too many fields.
    """
    try:
        found = parse_qs(body.decode(errors="replace"), keep_blank_values=True, max_num_fields=MAX_FIELDS)
    except ValueError as error:
        raise ProblemError(400, f"a form has at most {MAX_FIELDS} fields") from error
    return {name: values[0] for name, values in found.items()}


def _digest(value: str) -> str:
    return hashlib.sha256(value.encode(errors="replace")).hexdigest()[:32]


def session_id(request: Request) -> str:
    """The id of the session of a request. It does not reveal the cookie."""
    return _digest(request.cookies.get(COOKIE, ""))


def require(role: Role) -> Callable[[Request, Any], Awaitable[Identity]]:
    """A dependency that returns the identity of a request if its role includes `role`.

    The dependency raises ProblemError: 401 without a valid token or session, 403 if the role is too low. It also stores the identity
    in `request.state.identity`. It writes the first audit line of a permitted change before the change is made.
    """

    async def identified(request: Request, _: Annotated[Any, Depends(BEARER)]) -> Identity:
        known: Identity | None = getattr(request.state, "identity", None)
        identity = known or await access_of(request).identify(request)
        request.state.identity = identity
        is_enough = identity is not None and identity.role.includes(role)
        if not is_enough and request.method in READING:  # refused changes are counted in `Changes`
            request.app.state.changes.count_refused(request)
        if identity is None:
            raise unauthorised()
        if not is_enough:
            raise ProblemError(
                403, f"this needs the role {role.value}; {identity.name!r} has the role {identity.role.value}"
            )
        if request.method not in READING:
            await request.state.intend(identity)
        return identity

    return identified


MAX_BODY_BYTES = 256 * 1024
PER_ADDRESS = Rate(500, 100.0)
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}
"""Added to answers that do not set them. CORS is off: no header allows other sites to read anything."""


class Guard:
    """An ASGI application in front of another one.

    Args:
        application: receives the requests that pass.
        proxy: the address of the reverse proxy in front. Its X-Forwarded-For is trusted; other addresses than the proxy and loopback
            are refused.
        per_address: rate limit of one address.
        monotonic: seconds.
    """

    def __init__(
        self,
        application: Application,
        proxy: str | None = None,
        per_address: Rate = PER_ADDRESS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._application = application
        self._proxy = proxy
        self._requests: Buckets[str] = Buckets(per_address, monotonic)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self._application(scope, receive, send)
            return
        headers, sending = dict(scope["headers"]), _with_headers(send)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await refusal.answer(scope["path"])(scope, receive, sending)
            return
        await self._application(scope, _bounded(receive), sending)

    def _refusal(self, scope: Any, headers: dict[bytes, bytes]) -> ProblemError | None:
        address = scope["client"][0] if scope.get("client") else "unknown"
        if self._proxy is not None and address == self._proxy:
            named = headers.get(b"x-forwarded-for", b"").decode("latin-1").rpartition(",")[2].strip()
            scope["client"] = (address := named or address, 0)
            if headers.get(b"x-forwarded-proto") == b"https":
                scope["scheme"] = "https"
        elif self._proxy is not None and address not in LOOPBACK_HOSTS:
            return ProblemError(403, f"connect through the proxy {self._proxy} (`[api] proxy` in coordinator.toml)")
        if not self._requests.take(network_of(address)):
            return too_many("requests", self._requests.wait_s(network_of(address)))
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            return _too_large()
        return None


def _bounded(receive: Any) -> Any:
    taken = 0

    async def receive_bounded() -> Any:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > MAX_BODY_BYTES:
            raise _too_large()
        return message

    return receive_bounded


def _too_large() -> ProblemError:
    return ProblemError(413, f"the request body is larger than {MAX_BODY_BYTES} bytes", headers={"Connection": "close"})


def _with_headers(send: Any) -> Any:
    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            own = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                own.setdefault(name, value)
        await send(message)

    return send_with_headers
