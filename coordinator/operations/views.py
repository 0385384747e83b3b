"""What the API and the page show of federations, rounds, devices and tokens, from the database and the running services."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass

from pydantic import BaseModel, Field, Json

from coordinator.members.api_tokens import Role
from coordinator.rounds.records import (
    AttemptRecord,
    CertificateRecord,
    DeviceRecord,
    FederationRecord,
    ParticipantRecord,
    TokenRecord,
    TokenState,
)
from coordinator.service.coordinator import Coordinator
from coordinator.service.reports import DeviceProgress
from coordinator.storage.api_store import ApiTokenRecord
from coordinator.storage.store import Store
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.parts import Part, Report, ReportField


class FederationView(BaseModel):
    """A federation and where it stands; `round` and `attempt` are those that are open, or open next.

    Attributes:
        status: what the operator wants of it; `phase` is what it does.
        online, participants: of the running service; empty where none runs.
        unapproved: participants that take part as soon as their owners approve the spec.
        summed: of `upload` what leaves devices behind masks only.
    """

    federation: str
    method: str
    spec: str
    classes: tuple[str, ...]
    upload: tuple[Part, ...]
    summed: tuple[Part, ...]
    report: tuple[ReportField, ...]
    codec: str
    aggregate_codec: str
    status: str
    phase: str
    round: int
    attempt: int
    rounds: int
    policy: RoundPolicy
    reason: str
    continued_from: str | None
    created_at: float
    connected: bool
    epoch: int | None
    aggregate: str | None
    worker_pid: int | None
    online: list[str]
    participants: list[str]
    unapproved: list[str]
    left_out: dict[str, str]
    barred: dict[str, str]
    refused: dict[str, int]


class UpdateView(BaseModel, from_attributes=True):
    """The end of a client's update.

    Attributes:
        weight: the number of examples that it counts for in the merge; 0 in quarantine, None when it is not merged (yet).
        distances: L2 distance of each part from the round's base.
        figures: what it does beside the attempt's other updates (docs/security.md), and the action and reasons where that is odd.
    """

    client: str
    artifact: str
    bytes: int = Field(validation_alias="size")
    outcome: str
    reason: str
    report: Json[Report] | None
    weight: int | None
    distances: dict[str, float] = Field(validation_alias="distance_of")
    figures: Json[dict[str, object]] | None
    facts: Json[dict[str, str]] | None
    manifest_at: float
    stored_at: float


@dataclass(frozen=True, kw_only=True)
class AttemptView(AttemptRecord):
    """One attempt of a round, with its invited clients; times are unix seconds."""

    participants: list[ParticipantRecord]
    updates: list[UpdateView]


class RoundView(BaseModel):
    """A round: all its attempts, and its aggregate once there is one."""

    round: int
    state: str
    aggregate: str | None
    aggregate_bytes: int | None
    attempts: list[AttemptView]


class CertificateView(BaseModel):
    """A TLS certificate of a device; `serial` in hex, times are unix seconds."""

    serial: str
    issued_at: float
    expires_at: float
    revoked_at: float | None


@dataclass(frozen=True, kw_only=True)
class DeviceView(DeviceRecord):
    """A device that is or was enrolled.

    Attributes:
        last_seen_at: unix time; of a device that is online, when it came.
        online: the federations in which it has a session.
        participates: the federations whose open attempt it was invited to.
        left_out: by federation, why it is not invited while enough others are there, or at all.
        odd: by federation, what became of its last update where that was unlike the others.
        refused: messages of it that were refused since the coordinator started.
        progress: by federation, how far its training is.
        certificate_expires_at: of the last of its certificates that is not revoked.
    """

    online: list[str]
    participates: list[str]
    left_out: dict[str, str]
    odd: dict[str, str]
    refused: int
    silenced: bool
    progress: dict[str, DeviceProgress]
    certificate_expires_at: float | None
    certificates: list[CertificateView]


class TokenView(BaseModel):
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


class ApiTokenView(BaseModel):
    """A token of this API; `is_valid`: neither revoked nor expired."""

    id: str
    name: str
    role: Role
    created_at: float
    expires_at: float | None
    revoked_at: float | None
    last_used_at: float | None
    is_valid: bool


def federation_view(running: Coordinator, record: FederationRecord) -> FederationView:
    """A federation, with the state of its service where one runs, else with the stored one."""
    service = running.services.get(record.id)
    state = running.store.round_state(record.id) if service is None else service.state
    spec = running.spec(record)
    aggregates = running.store.aggregates(record.id)
    policy = record.policy
    return FederationView(
        federation=record.id,
        method=record.method,
        spec=record.spec,
        classes=spec.classes,
        upload=spec.upload,
        summed=spec.summed,
        report=spec.report,
        codec=spec.codec,
        aggregate_codec=spec.aggregate_codec,
        status=record.status.value,
        phase=state.label,
        round=state.round,
        attempt=state.attempt,
        rounds=policy.rounds,
        policy=policy,
        reason=record.reason(state),
        continued_from=record.continued_from,
        created_at=record.created_at,
        connected=service is not None and service.is_connected,
        epoch=None if service is None else service.epoch,
        aggregate=aggregates[-1].artifact if aggregates else None,
        worker_pid=None if service is None else service.round_driver.worker_pid,
        online=sorted(state.online),
        participants=sorted(state.participants),
        unapproved=sorted(state.unapproved),
        left_out=dict(state.left_out),
        barred=dict(state.barred),
        refused={} if service is None else service.refusals,
    )


def round_view(store: Store, number: int, attempts: list[AttemptRecord]) -> RoundView:
    """A round, from its attempts."""
    aggregate = store.aggregate(attempts[0].federation, number)
    return RoundView(
        round=number,
        state=attempts[-1].state.value,
        aggregate=None if aggregate is None else aggregate.artifact,
        aggregate_bytes=None if aggregate is None else aggregate.size,
        attempts=[_attempt(store, attempt) for attempt in attempts],
    )


def _attempt(store: Store, record: AttemptRecord) -> AttemptView:
    updates = [UpdateView.model_validate(update) for update in store.updates(record.federation, record.at)]
    participants = store.participants(record.federation, record.at)
    return AttemptView(**asdict(record), participants=participants, updates=updates)


def device_view(
    running: Coordinator,
    device: DeviceRecord,
    certificates: Sequence[CertificateRecord] = (),
    silenced: Collection[str] = (),
) -> DeviceView:
    """A device, with what the running services keep of it.

    Args:
        running: the coordinator.
        device: its record.
        certificates: its own, and perhaps those of other devices too.
        silenced: devices that are off the broker's list by the file of the home, where no service runs.
    """
    services = running.services
    states = {federation: service.state for federation, service in services.items()}
    own = [CertificateView(**asdict(known)) for known in certificates if known.device == device.id]
    return DeviceView(
        **asdict(device),
        online=[federation for federation, state in states.items() if device.id in state.online],
        participates=[federation for federation, state in states.items() if device.id in state.participants],
        left_out={
            federation: reason
            for federation, state in states.items()
            if (reason := state.barred.get(device.id) or state.left_out.get(device.id))
        },
        odd={
            federation: f"round {odd.round}: {odd.reason}"
            for federation, service in services.items()
            if (odd := service.round_driver.odd.get(device.id)) is not None
        },
        refused=sum(service.refused_of(device.id) for service in services.values()),
        silenced=device.id in silenced or any(service.floods.is_silenced(device.id) for service in services.values()),
        progress={
            federation: progress
            for federation, service in services.items()
            if (progress := service.progress.get(device.id)) is not None
        },
        certificate_expires_at=max((known.expires_at for known in own if known.revoked_at is None), default=None),
        certificates=own,
    )


def token_view(token: TokenRecord) -> TokenView:
    """An enrolment token without its hash."""
    return TokenView(state=token.state(time.time()), **asdict(token))


def api_token_view(token: ApiTokenRecord) -> ApiTokenView:
    """An API token without its hash."""
    return ApiTokenView(is_valid=token.is_valid(time.time()), **asdict(token))
