"""What a check of `fedcg doctor` finds, and what several checks ask of the device. Never imports torch."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.own_backbone import known_spec
from edge_client.store.private_store import open_store
from fedcg.learning.spec import FederationSpec

Result = tuple[str, str, str]  # state, detail and advice of a finding


@dataclass(frozen=True)
class Finding:
    """The outcome of one check.

    Attributes:
        state: "ok", "warning" (works, but look at it) or "failed".
        advice: what to do, where there is something to do.
    """

    check: str
    state: str
    detail: str
    advice: str = ""


def existing_place(place: Path) -> Path:
    """The nearest folder that exists."""
    while not place.exists():
        place = place.parent
    return place


def spec_of(config: AgentConfig) -> FederationSpec | None:
    """The federation's spec, where this device has one."""
    with contextlib.suppress(EdgeError, OSError):
        return known_spec(open_store(config))
    return None
