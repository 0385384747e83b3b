"""The HTTP interface, read only: the state of the federations, their rounds and the devices. Versioned under /api/v1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel, Field, Json

from coordinator.errors import StoreError
from coordinator.rounds.records import AttemptRecord, DeviceRecord, FederationRecord, ParticipantRecord
from coordinator.service.coordinator import Coordinator
from coordinator.storage.store import Store
from fedcg.learning.spec import RoundPolicy
from fedcg.wire.parts import Part, ReportField


class FederationView(BaseModel):
    """A federation and where it stands; `round` and `attempt` are those that are open, or open next.

    Attributes:
        status: what the operator wants of it; `phase` is what it does.
        online, participants: of the running service; empty where none runs.
    """

    federation: str
    method: str
    spec: str
    classes: tuple[str, ...]
    upload: tuple[Part, ...]
    report: tuple[ReportField, ...]
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
    report: Json[dict[str, object]] | None
    weight: int | None
    distances: dict[str, float] = Field(validation_alias="distance_of")
    figures: Json[dict[str, object]] | None
    manifest_at: float
    stored_at: float


@dataclass(frozen=True)
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


@dataclass(frozen=True, kw_only=True)
class DeviceView(DeviceRecord):
    """A device that is or was enrolled.

    Attributes:
        online: the federations in which it has a session.
        participates: the federations whose open attempt it was invited to.
        left_out: by federation, why it is not invited while enough others are there, or at all.
        refused: messages of it that were refused since the coordinator started.
    """

    online: list[str]
    participates: list[str]
    left_out: dict[str, str]
    refused: int
    silenced: bool


class HealthView(BaseModel):
    """Whether the coordinator works."""

    status: str


def _coordinator(request: Request) -> Coordinator:
    coordinator: Coordinator = request.app.state.coordinator
    return coordinator


Running = Annotated[Coordinator, Depends(_coordinator)]
router = APIRouter()


@router.get("/healthz")
async def healthz() -> HealthView:  # on no thread: it answers also when all are busy
    """Whether the process answers."""
    return HealthView(status="ok")


@router.get("/readyz")
async def readyz(running: Running, response: Response) -> HealthView:
    """Whether every federation is connected to the broker; 503 when not."""
    cut_off = [federation for federation, service in running.services.items() if not service.is_connected]
    if cut_off:
        response.status_code = 503
        return HealthView(status=f"no link to the broker: {', '.join(cut_off)}")
    return HealthView(status="ok")


@router.get("/api/v1/federations")
def federations(running: Running) -> list[FederationView]:
    """All federations, oldest first."""
    return [federation_view(running, record) for record in running.store.federations()]


@router.get("/api/v1/federations/{federation}")
def federation(federation: str, running: Running) -> FederationView:
    """One federation and where it stands."""
    return federation_view(running, _record(running, federation))


@router.get("/api/v1/federations/{federation}/rounds")
def rounds(federation: str, running: Running) -> list[RoundView]:
    """All rounds so far, oldest first."""
    attempts = running.store.attempts(_record(running, federation).id)
    numbers = sorted({attempt.round for attempt in attempts})
    return [_round(running.store, number, [item for item in attempts if item.round == number]) for number in numbers]


@router.get("/api/v1/federations/{federation}/rounds/{number}")
def one_round(federation: str, number: int, running: Running) -> RoundView:
    """One round; 404 when it was never opened."""
    stored = running.store.attempts(_record(running, federation).id)
    attempts = [item for item in stored if item.round == number]
    if not attempts:
        raise HTTPException(404, f"round {number} of {federation} was not opened yet")
    return _round(running.store, number, attempts)


@router.get("/api/v1/devices")
def devices(running: Running) -> list[DeviceView]:
    """All devices, also those that were revoked or left."""
    return [device_view(running, device) for device in running.store.devices()]


def device_view(running: Coordinator, device: DeviceRecord) -> DeviceView:
    """A device, with what the running services keep of it."""
    services = running.services
    states = {federation: service.state for federation, service in services.items()}
    return DeviceView(
        **asdict(device),
        online=[federation for federation, state in states.items() if device.id in state.online],
        participates=[federation for federation, state in states.items() if device.id in state.participants],
        left_out={
            federation: reason
            for federation, state in states.items()
            if (reason := state.barred.get(device.id) or state.left_out.get(device.id))
        },
        refused=sum(service.refused_of(device.id) for service in services.values()),
        silenced=any(service.is_silenced(device.id) for service in services.values()),
    )


def federation_view(running: Coordinator, record: FederationRecord) -> FederationView:
    """A federation, with the state of its service where one runs, else with the stored one."""
    service = running.services.get(record.id)
    state = running.store.round_state(record.id) if service is None else service.state
    spec = running.spec(record)
    aggregates = running.store.aggregates(record.id)
    policy = record.operator_policy
    return FederationView(
        federation=record.id,
        method=record.method,
        spec=record.spec,
        classes=spec.classes,
        upload=spec.upload,
        report=spec.report,
        status=record.status.value,
        phase=state.phase.value,
        round=state.round,
        attempt=state.attempt,
        rounds=policy.rounds,
        policy=policy,
        reason=state.reason or record.status_reason,
        continued_from=record.continued_from,
        created_at=record.created_at,
        connected=service is not None and service.is_connected,
        epoch=None if service is None else service.epoch,
        aggregate=aggregates[-1].artifact if aggregates else None,
        worker_pid=None if service is None else service.worker_pid,
        online=sorted(state.online),
        participants=sorted(state.participants),
        left_out=dict(state.left_out),
        barred=dict(state.barred),
        refused={} if service is None else service.refusals,
    )


def _record(running: Coordinator, federation: str) -> FederationRecord:
    try:
        return running.store.federation(federation)
    except StoreError as error:
        raise HTTPException(404, str(error)) from error


def _round(store: Store, number: int, attempts: list[AttemptRecord]) -> RoundView:
    aggregate = store.aggregate(attempts[0].federation, number)
    return RoundView(
        round=number,
        state=attempts[-1].state.value,
        aggregate=None if aggregate is None else aggregate.artifact,
        aggregate_bytes=None if aggregate is None else aggregate.size,
        attempts=[_attempt(store, attempt) for attempt in attempts],
    )


def _attempt(store: Store, record: AttemptRecord) -> AttemptView:
    key = (record.federation, record.round, record.attempt)
    updates = [UpdateView.model_validate(update) for update in store.updates(key)]
    return AttemptView(**asdict(record), participants=store.participants(key), updates=updates)
