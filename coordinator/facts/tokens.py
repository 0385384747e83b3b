"""The tokens: those with which devices enrol and those of the API, without their secrets."""

from dataclasses import asdict

from pydantic import BaseModel

from coordinator.members.api_tokens import Role
from coordinator.rounds.records import ApiTokenRecord, TokenRecord, TokenState


class TokenFacts(BaseModel, frozen=True):
    """An enrolment token; for the fields see `TokenRecord`."""

    id: str
    state: TokenState
    device: str | None
    replaces: bool
    federation: str | None
    created_at: float
    expires_at: float
    used_at: float | None
    used_by: str | None


class ApiTokenFacts(BaseModel, frozen=True):
    """A token of this API; `is_valid`: neither revoked nor expired."""

    id: str
    name: str
    role: Role
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    is_valid: bool


def token_facts(token: TokenRecord, now: float) -> TokenFacts:
    """An enrolment token without its hash."""
    return TokenFacts(state=token.state(now), **asdict(token))


def api_token_facts(token: ApiTokenRecord, now: float) -> ApiTokenFacts:
    """An API token without its hash."""
    return ApiTokenFacts(is_valid=token.is_valid(now), **asdict(token))
