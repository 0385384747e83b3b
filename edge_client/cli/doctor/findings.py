"""The findings of `fedcg doctor`, and helpers that several checks share. Never imports torch."""

import contextlib
from pathlib import Path

from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.own_backbone import known_spec
from edge_client.store.private_store import open_store
from fedcg.errors import in_words
from fedcg.event_log import log_text
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value

Result = tuple[str, str, str]  # state, detail and advice of a finding


class Finding(Value):
    """The outcome of one check.

    Attributes:
        state: "ok", "warning" (works, but look at it) or "failed".
        advice: what to do; empty if nothing.
    """

    check: str
    state: str
    detail: str
    advice: str = ""


def finding_of(check: str, result: Result) -> Finding:
    """A check's result as a finding. Texts are escaped, so that names in them can't control the terminal."""
    return Finding(check, *(log_text(in_words(text), len(text)) for text in result))


def existing_place(place: Path) -> Path:
    """The path itself, or its nearest existing parent folder."""
    while not place.exists():
        place = place.parent
    return place


def spec_of(config: AgentConfig) -> FederationSpec | None:
    """The federation's spec, or None if this device has none."""
    with contextlib.suppress(EdgeError, OSError):
        return known_spec(open_store(config))
    return None
