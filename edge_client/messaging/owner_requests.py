"""Requests of commands on this device to the running agent, and replies: strict schemas, no I/O."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from edge_client.store.owner_record import MAX_REASON
from fedcg.wire.messages.messages import Sha256

MAX_PAUSE_S = 366 * 86_400.0
Reply = dict[str, Any]


class _Request(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
    v: Literal[1] = 1


class PauseRequest(_Request):
    """Train no new round; `now`: abandon the one under way, too."""

    command: Literal["pause"] = "pause"
    for_s: Annotated[float, Field(gt=0, le=MAX_PAUSE_S)] | None = None
    reason: Annotated[str, Field(max_length=MAX_REASON)] = ""
    now: bool = False


class ResumeRequest(_Request):
    """End the pause."""

    command: Literal["resume"] = "resume"


class StatusRequest(_Request):
    """The live state."""

    command: Literal["status"] = "status"


class ApproveRequest(_Request):
    """Approve exactly this spec."""

    command: Literal["approve"] = "approve"
    spec: Sha256


class RevokeRequest(_Request):
    """Revoke the approval of a spec."""

    command: Literal["revoke"] = "revoke"
    spec: Sha256


OwnerRequest = PauseRequest | ResumeRequest | StatusRequest | ApproveRequest | RevokeRequest
REQUESTS: TypeAdapter[OwnerRequest] = TypeAdapter(Annotated[OwnerRequest, Field(discriminator="command")])


@dataclass(frozen=True)
class Asked:
    """A request that waits for the loop's answer."""

    request: OwnerRequest
    answer: queue.SimpleQueue[Reply] = field(default_factory=queue.SimpleQueue)


def success(data: Reply) -> Reply:
    """The reply to a request that was carried out."""
    return {"ok": True, "data": data}


def failure(error: str) -> Reply:
    """The reply to a request that was not."""
    return {"ok": False, "error": error}
