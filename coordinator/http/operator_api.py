"""The HTTP interface, read only: the state of the federation, its rounds and its devices. Versioned under /api/v1."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from pydantic import BaseModel, Field, Json

from coordinator.rounds.records import AttemptRecord, DeviceRecord, ParticipantRecord
from coordinator.service.service import Service
from coordinator.service.service_context import ServiceContext
from fedcg.wire.parts import Part, ReportField


class FederationView(BaseModel):
    """A federation and where it stands; `round` and `attempt` are those that are open, or open next."""

    federation: str
    method: str
    spec: str
    classes: tuple[str, ...]
    upload: tuple[Part, ...]
    report: tuple[ReportField, ...]
    phase: str
    round: int
    attempt: int
    rounds: int
    min_clients: int
    reason: str
    epoch: int
    aggregate: str | None
    worker_pid: int | None
    refused: dict[str, int]


class UpdateView(BaseModel, from_attributes=True):
    """The end of a client's update.

    Attributes:
        weight: the number of examples that it counts for in the merge; None when it is not merged (yet).
        distances: L2 distance of each part from the round's base.
    """

    client: str
    artifact: str
    bytes: int = Field(validation_alias="size")
    outcome: str
    reason: str
    report: Json[dict[str, object]] | None
    weight: int | None
    distances: dict[str, float] = Field(validation_alias="distance_of")
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
        left_out: why it is not invited while enough others are there.
        refused: messages of it that were refused since the coordinator started.
    """

    online: bool
    participates: bool
    left_out: str
    refused: int
    silenced: bool


class HealthView(BaseModel):
    """Whether the coordinator works."""

    status: str


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def _context(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


Running = Annotated[Service, Depends(_service)]
Given = Annotated[ServiceContext, Depends(_context)]
router = APIRouter()


@router.get("/healthz")
async def healthz() -> HealthView:  # on no thread: it answers also when all are busy
    """Whether the process answers."""
    return HealthView(status="ok")


@router.get("/readyz")
async def readyz(service: Running, response: Response) -> HealthView:
    """Whether the coordinator is connected to its broker and can store artifacts; 503 when not."""
    if service.store_problem:
        response.status_code = 503
        return HealthView(status=service.store_problem)
    if not service.is_connected:
        response.status_code = 503
        return HealthView(status="no link to the broker")
    return HealthView(status="ok")


@router.get("/api/v1/federation")
def federation(service: Running, given: Given) -> FederationView:
    """The federation and where it stands."""
    state, spec, record = service.state, given.spec, given.federation
    aggregates = given.store.aggregates(record.id)
    return FederationView(
        federation=record.id,
        method=record.method,
        spec=record.spec,
        classes=spec.classes,
        upload=spec.upload,
        report=spec.report,
        phase=state.phase.value,
        round=state.round,
        attempt=state.attempt,
        rounds=record.rounds,
        min_clients=record.min_clients,
        reason=state.reason,
        epoch=service.epoch,
        aggregate=aggregates[-1].artifact if aggregates else None,
        worker_pid=service.worker_pid,
        refused=service.refusals,
    )


@router.get("/api/v1/rounds")
def rounds(given: Given) -> list[RoundView]:
    """All rounds so far, oldest first."""
    attempts = given.store.attempts(given.federation.id)
    numbers = sorted({attempt.round for attempt in attempts})
    return [_round(given, number, [item for item in attempts if item.round == number]) for number in numbers]


@router.get("/api/v1/rounds/{number}")
def one_round(number: int, given: Given) -> RoundView:
    """One round; 404 when it was never opened."""
    attempts = [item for item in given.store.attempts(given.federation.id) if item.round == number]
    if not attempts:
        raise HTTPException(404, f"round {number} was not opened yet")
    return _round(given, number, attempts)


@router.get("/api/v1/devices")
def devices(service: Running, given: Given) -> list[DeviceView]:
    """All devices, also those that were revoked or left."""
    state = service.state
    return [
        DeviceView(
            **asdict(device),
            online=device.id in state.online,
            participates=device.id in state.participants,
            left_out=state.left_out.get(device.id, ""),
            refused=service.refused_of(device.id),
            silenced=service.is_silenced(device.id),
        )
        for device in given.store.devices()
    ]


def _round(given: ServiceContext, number: int, attempts: list[AttemptRecord]) -> RoundView:
    aggregate = given.store.aggregate(given.federation.id, number)
    return RoundView(
        round=number,
        state=attempts[-1].state.value,
        aggregate=None if aggregate is None else aggregate.artifact,
        aggregate_bytes=None if aggregate is None else aggregate.size,
        attempts=[_attempt(given, attempt) for attempt in attempts],
    )


def _attempt(given: ServiceContext, record: AttemptRecord) -> AttemptView:
    key = (record.federation, record.round, record.attempt)
    updates = [UpdateView.model_validate(update) for update in given.store.updates(key)]
    return AttemptView(**asdict(record), participants=given.store.participants(key), updates=updates)
