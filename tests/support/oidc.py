"""A real OpenID Connect provider on loopback, which a test can make answer wrongly, and people who sign in without a browser."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import flask
import httpx
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import RSAKey
from werkzeug.serving import make_server

from coordinator.config import OidcSettings
from coordinator.http.oidc import Oidc

SECRET, ROLES = "s3cret: 100 %", {"fleet-admins": "admin", "plant": "viewer"}


@dataclass
class Provider:
    """A running provider; `claims` and `key` change its ID tokens."""

    issuer: str
    claims: dict[str, Any] = field(default_factory=dict)
    key: RSAKey | None = None
    challenge: str = ""

    def oidc(self, page_url: str, **changes: Any) -> Oidc:
        """The sign-in of a page with this provider."""
        given = {"issuer": self.issuer, "client_id": "fedcg", "client_secret_file": "x", "roles": ROLES, **changes}
        return Oidc(OidcSettings.model_validate({"page_url": page_url, **given}), SECRET, b"key")

    def sign_in(self, page: httpx.Client, person: str, to: str = "/", wrong: str = "") -> httpx.Response:
        """Sign in as a browser does, with one `wrong` parameter. Returns the page's last answer."""
        url = httpx.URL(page.get("/login/oidc", params={"to": to}).headers["location"])
        granted = httpx.post(url.copy_set_param(wrong, "x") if wrong else url, data={"sub": person})
        return page.get(granted.headers["location"])


@contextmanager
def running_provider(**groups: object) -> Iterator[Provider]:
    """A provider with these people and their groups. It refuses a code without the right verifier or client secret."""
    from oidc_provider_mock import User, app  # warns of a deprecated module, which pyproject.toml allows within a test

    people = [User(sub=name, claims={"groups": each, "preferred_username": name}) for name, each in groups.items()]
    served = app(user_claims=people, require_nonce=True)
    with make_server("127.0.0.1", 0, served, threaded=True) as server:
        made = Provider(f"http://localhost:{server.server_port}")

        def check() -> None:
            asked, client = flask.request, flask.request.authorization
            made.challenge = asked.args.get("code_challenge", made.challenge)
            if asked.path == "/oauth2/token":
                challenge = create_s256_code_challenge(asked.form["code_verifier"])
                if client is None or (client.password, challenge) != (SECRET, made.challenge):
                    flask.abort(401)

        def change(answer: flask.Response) -> flask.Response:
            if flask.request.path == "/oauth2/token" and answer.status_code == 200:
                key = RSAKey.import_key(flask.g.oidc_provider_mock_storage.jwk.as_dict(is_private=True))
                content = json.loads(answer.data)
                token = jwt.decode(content["id_token"], key)
                content["id_token"] = jwt.encode(token.header, token.claims | made.claims, made.key or key)
                answer.data = json.dumps(content)
            return answer

        served.before_request(check)
        served.after_request(change)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield made
        server.shutdown()
