"""Sign-in with an OpenID Connect provider: authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636). It knows no sessions.

State, nonce and verifier are derived from a cookie with the coordinator's secret, so only the browser that began can finish.
"""

import hmac
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import anyio
import httpx
from pydantic import TypeAdapter

from coordinator.config import SECURE_URL, OidcSettings
from coordinator.http.refusals import ProblemError
from coordinator.members.api_tokens import Identity, Role
from fedcg.event_log import log_text

FLOW_COOKIE, FLOW_PATH, CALLBACK = "fedcg_sign_in", "/login/oidc", "/login/oidc/callback"
FLOW_S, TIMEOUT_S, LEEWAY_S = 600, 10.0, 60
"""Time to sign in at the provider, time for each of its answers, and allowed difference between the clocks."""
MAX_ANSWER_BYTES, MAX_NAME, MAX_PATH = 256 * 1024, 64, 1000
"""`MAX_PATH`: characters of the path to return to; a cookie has at most 4096 bytes."""
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures with public keys only."""
CODE_GRANT, PLAIN = "authorization_code", {"Accept-Encoding": "identity"}
"""`PLAIN`: a compressed answer could be far larger than its bytes on the network."""


class Oidc:
    """Signs people in.

    Args:
        settings: [oidc] in coordinator.toml; without an issuer, sign-in is off.
        secret: the client's secret.
        key: the values of a flow are derived from it.
        clock: unix time.
    """

    def __init__(self, settings: OidcSettings, secret: str, key: bytes, clock: Callable[[], float] = time.time) -> None:
        self.settings, self.issuer, self.host = settings, settings.issuer or "", urlsplit(settings.issuer or "").netloc
        self._secret, self._key, self._clock = secret, key, clock
        self._own, self._callback = settings.client_id or "", f"{(settings.page_url or '').rstrip('/')}{CALLBACK}"
        self._provider: dict[str, Any] = {}

    def role_of(self, account: str, groups: Iterable[str]) -> Role | None:
        """The highest role of the groups of an account; None if they have none, or the account is of another issuer."""
        found = [Role(self.settings.roles[each]) for each in groups if each in self.settings.roles]
        return max(found, key=list(Role).index, default=None) if account.startswith(f"{self.issuer}#") else None

    async def begin(self, to: str) -> tuple[str, str]:
        """Begin to sign in; `to` is the path to show afterwards.

        Returns:
            The URL at the provider, and the value of the cookie `FLOW_COOKIE`.

        Raises:
            ProblemError: 404, sign-in is off; 502, the provider gives no valid answer.
        """
        from authlib.oauth2.client import OAuth2Client

        endpoint, to = await self._endpoint("authorization_endpoint"), quote(to, safe="")
        flow = f"{self._clock() + FLOW_S:.0f}.{secrets.token_hex(32)}.{to if len(to) <= MAX_PATH else '%2F'}"
        state, nonce, verifier = self._derived(flow)
        client = OAuth2Client(None, self._own, code_challenge_method="S256")
        asked = {"scope": self.settings.scopes, "redirect_uri": self._callback, "nonce": nonce}
        return client.create_authorization_url(endpoint, state, verifier, **asked)[0], flow

    async def finish(self, flow: str, query: Mapping[str, str]) -> tuple[Identity, tuple[str, ...], str]:
        """Finish after the provider's redirect.

        Args:
            flow: the value of the cookie `FLOW_COOKIE`.
            query: the parameters of the redirect.

        Returns:
            The person, the person's groups that have a role, and the path to show.

        Raises:
            ProblemError: 400, another browser began, or too long ago; 403, the provider refused, its ID token is not valid, or the person
                has no role; 502, the provider gives no valid answer.
        """
        state, nonce, verifier = self._derived(flow)
        is_own = hmac.compare_digest(state.encode(), query.get("state", "").encode())
        if not is_own or self._clock() > float(flow.partition(".")[0]):
            raise ProblemError(400, f"this browser began no sign-in in the last {FLOW_S // 60} minutes; sign in again")
        if "code" not in query:
            raise ProblemError(403, f"{self.host} refused: {query.get('error_description', query.get('error'))!r:.300}")
        claims = await self._claims(query["code"], nonce, verifier)
        given, account = claims.get(self.settings.claim), f"{self.issuer}#{claims['sub']}"
        groups = tuple(each for each in self.settings.roles if each in (given if isinstance(given, list) else [given]))
        name = log_text(str(claims.get("preferred_username") or claims.get("email") or claims["sub"]), MAX_NAME)
        role = self.role_of(account, groups)
        if role is None:
            raise ProblemError(403, f"{name} has no role here: [oidc] roles has none of {given!r:.300}; ask an admin")
        return Identity(name, role, account), groups, unquote(flow.split(".", 2)[2])

    async def _claims(self, code: str, nonce: str, verifier: str) -> dict[str, Any]:
        """The claims of the ID token behind a code."""
        from authlib.oidc.core import CodeIDToken
        from joserfc import errors, jwk, jwt

        data = {"code": code, "code_verifier": verifier, "redirect_uri": self._callback, "grant_type": CODE_GRANT}
        tokens = await self._read(await self._endpoint("token_endpoint"), data=data, auth=(self._own, self._secret))
        keys: Any = await self._read(await self._endpoint("jwks_uri"))
        expected = {"iss": {"value": self.issuer}, "aud": {"value": self._own}, "sub": {"validate": _is_id}}
        params = {"nonce": nonce, "client_id": self._own, "access_token": tokens.get("access_token")}
        try:
            token = jwt.decode(tokens["id_token"], jwk.KeySet.import_key_set(keys), ALGORITHMS)
            claims = CodeIDToken(token.claims, token.header, expected, params)
            claims.validate(leeway=LEEWAY_S)
        except (errors.JoseError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ProblemError(403, f"the ID token of {self.host} is refused: {error!r:.300}") from error
        return dict(claims)

    async def _endpoint(self, name: str) -> str:
        """An address of the provider, whose description is read once."""
        if not self.issuer:
            raise ProblemError(404, "sign-in with a provider is off; an admin sets [oidc] in coordinator.toml")
        described = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
        found = self._provider or await self._read(described)
        if found.get("issuer") != self.issuer or not re.fullmatch(SECURE_URL, str(found.get(name))):
            raise ProblemError(502, f"{described} is of another issuer or has no secure {name}; check [oidc] issuer")
        self._provider = found
        return str(found[name])

    async def _read(self, url: str, **request: Any) -> dict[str, Any]:
        """A JSON object from the provider; one that is too long is cut, and refused. Redirects are not followed."""
        try:
            with anyio.fail_after(TIMEOUT_S):
                method = "POST" if "data" in request else "GET"
                async with httpx.AsyncClient(headers=PLAIN) as client, client.stream(method, url, **request) as answer:
                    content = await anext(answer.aiter_raw(MAX_ANSWER_BYTES), b"")
                    answer.raise_for_status()
            return TypeAdapter(dict[str, Any]).validate_json(content)
        except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ProblemError(502, f"no valid answer from {url}: {error!r:.300}; check [oidc]") from error

    def _derived(self, flow: str) -> list[str]:
        """State, nonce and verifier of a flow."""
        return [hmac.digest(self._key, f"{use} {flow}".encode(), "sha256").hex() for use in ("state", "nonce", "code")]


def _is_id(_: object, subject: str) -> bool:
    return re.fullmatch(r"[ -~]{1,255}", subject) is not None
