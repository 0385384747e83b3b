"""Executes the state machine's commands: send, fetch, check, start training, store. Never imports torch."""

import contextlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from edge_client.agent.owner import OwnerControl
from edge_client.agent.reports import describe_end
from edge_client.config import AgentConfig
from edge_client.link.artifact_transfer import ArtifactTransfer
from edge_client.link.coordinator_link import CoordinatorLink
from edge_client.session import signals
from edge_client.session.state import SessionState
from edge_client.store.private_store import FINALISED_FILE, DeliveryRecord, PrivateStore
from edge_client.store.sum_keeper import SumKeeper
from edge_client.training.trainer_handle import TrainerHandle
from fedcg.event_log import EventLog
from fedcg.learning.spec import FederationSpec
from fedcg.wire.errors import IntegrityError, SumError, WireError
from fedcg.wire.messages.schemas import (
    ArtifactRef,
    DeclineReason,
    FromDevice,
    RoundAttempt,
    SumDealt,
    SumExchange,
    SumObstacle,
    SumOff,
    SumOpened,
    SumRefused,
    SumUp,
)
from fedcg.wire.sums import SumRound
from fedcg.wire.transfer.chunk_sender import ChunkFile


@dataclass(eq=False)
class CommandExecutor:
    """Executes commands.

    Args:
        config: of this device.
        store: its private store.
        link: sends messages to the coordinator.
        transfer: transfers artifacts.
        trainer: the training process.
        owner: the decisions of the device's owner.
        chunk_bytes: returns the chunk size that fits the link.
        events: the event log.
        clock: monotonic seconds.

    Attributes:
        outcome: whether the federation ended successfully on this device; None before its end.
        why: for each decline reason, the latest explanation, which stays on this device.
    """

    config: AgentConfig
    store: PrivateStore
    link: CoordinatorLink
    transfer: ArtifactTransfer
    trainer: TrainerHandle
    owner: OwnerControl
    chunk_bytes: Callable[[], int]
    events: EventLog
    clock: Callable[[], float]
    _update: ChunkFile | None = field(default=None, init=False)
    _sent: str = field(default="", init=False)
    why: dict[DeclineReason, str] = field(default_factory=dict, init=False)
    outcome: bool | None = field(default=None, init=False)
    _announced: tuple[RoundAttempt, SumExchange] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._sum_key = self.store.sum_key()
        least = self.config.policy.least_sum
        self._sums = {one: SumKeeper(self.store, self.config.device, least, one) for one in get_args(SumExchange)}
        self._handlers: dict[type[Any], Callable[[Any, SessionState], signals.Event | None]] = {
            signals.SendHello: lambda command, state: self.link.hello(state.epoch, state.committed),
            signals.Send: lambda command, state: self.link.send(command.message),
            signals.SendChunks: self._send_chunks,
            signals.Want: self._want,
            signals.LoadUpdate: self._load_update,
            signals.CheckSpec: self._check_spec,
            signals.StartTrainer: self._start_trainer,
            signals.ReleaseTrainer: lambda command, state: self.trainer.send(command),
            signals.WeighRound: self._start_job,
            signals.AnnounceSum: self._announce_sum,
            signals.SumStepped: self._answer_sum,
            signals.TrainRound: self._start_job,
            signals.ChooseModel: self._start_job,
            signals.RecordDelivery: self._record_delivery,
            signals.RecordReason: self._record_reason,
            signals.Note: self._note,
            signals.Done: self._done,
        }

    def carry_out(self, command: signals.Command, state: SessionState) -> signals.Event | None:
        """Execute a command. Returns an event that follows immediately, if any."""
        return self._handlers[type(command)](command, state)

    def _load_update(self, command: signals.LoadUpdate, state: SessionState) -> signals.Event:
        """Load the newest generation's update, in chunks for the link. Its digest is the one from the commit."""
        generation = self.store.generations.newest()
        assert generation is not None
        assert generation.outbox is not None
        entry, path = generation.outbox, self.store.generations.update_path(generation)
        ref = ArtifactRef(id=entry.artifact, size=entry.size, chunk_bytes=self.chunk_bytes())
        known = None if self._update is None else self._update.ref
        if known is not None and known.id == ref.id and known.chunk_bytes < ref.chunk_bytes:
            ref = known  # keep an announced chunk size if the link supports it
        if known != ref:
            self._update = ChunkFile(path, ref)
        return signals.OutboxFound(generation.round_attempt, ref)

    def _send_chunks(self, command: signals.SendChunks, state: SessionState) -> None:
        if self._update is not None and self._update.ref == command.update:
            if self._sent != command.update.id and state.delivery is not None:
                self._record_sending()
                self._sent, at = command.update.id, state.delivery.round_attempt
                self.events.write("sending", **vars(at), artifact=command.update.id, bytes=command.update.size)
            self.transfer.carrier.send(self._update, command.ranges)

    def _record_sending(self) -> None:
        """Record an update durably before its first byte leaves. If that fails, the update is not sent."""
        generation = self.store.generations.newest()
        assert generation is not None
        data = self.store.generations.update_bytes(generation)
        if self.owner.sent.update(data):  # False if an earlier process has already counted it
            self.owner.traffic.sent(len(data))

    def _want(self, command: signals.Want, state: SessionState) -> signals.Event | None:
        try:
            self.transfer.downloads.want(command.downloads, self.clock())
        except WireError as error:
            self.events.write("refused", what="offer", detail=str(error))
            self.why[DeclineReason.SPEC_REFUSED] = str(error)
            if state.offer is not None:
                # refused until the agent restarts: a correct coordinator does not ask for this
                return signals.SpecChecked(state.offer.spec.id, DeclineReason.SPEC_REFUSED)
        return None

    def _check_spec(self, command: signals.CheckSpec, state: SessionState) -> signals.Event:
        spec = self.store.spec(command.digest)
        refusal: tuple[DeclineReason, str] | None = (DeclineReason.SPEC_REFUSED, "not a spec of this federation")
        if spec is not None and spec.federation == self.config.federation:
            refusal = self.owner.check(spec) or self._without_roster(spec)
        if spec is not None and refusal is None:
            return signals.SpecChecked(command.digest, None, is_sealed=bool(spec.sealed))
        assert refusal is not None
        reason, detail = refusal
        self.events.write("refused", what="spec", reason=reason.value, detail=detail)
        self.why[reason] = detail
        return signals.SpecChecked(command.digest, reason)

    def _without_roster(self, spec: FederationSpec) -> tuple[DeclineReason, str] | None:
        if not spec.sealed or self.store.roster().keys.get(self.config.device) == self._sum_key.public:
            return None
        way = "`fedcg cohort card` on every device, `fedcg cohort roster FILE` with all cards, then restart the agent"
        return DeclineReason.SPEC_REFUSED, f"sealed sums need a roster with this device's card: {way}"

    def _announce_sum(self, command: signals.AnnounceSum, state: SessionState) -> signals.Event | None:
        """Announce keys for the round's next sum. If weights are secret, their sum comes first."""
        at, spec = command.round_attempt, self.store.spec("" if state.offer is None else state.offer.spec.id)
        if spec is None or spec.has_public_counts:
            return self._announce("parts", at, state, command.images, None, command.vote)
        found = self._sums["weights"].found(self._sum_round(at, "weights"))
        if found is None:
            return self._announce("weights", at, state, command.images, None, command.vote)
        return self._announce("parts", at, state, *found)

    def _announce(
        self, exchange: SumExchange, at: RoundAttempt, state: SessionState, count: int, total: int | None, vote: int
    ) -> signals.Event | None:
        obstacle = self.store.sum_gate.obstacle(at.round)
        keys = None if obstacle else self._sums[exchange].announce(self._sum_round(at, exchange), count, vote, total)
        if obstacle:
            self._refuse_sum(at, exchange, SumObstacle.BLOCKED, state)
        if keys is None:
            known = "this device's numbers of this or a later round are already in a sum"
            self.events.write("sum_off", **vars(at), reason=obstacle or known)
            return signals.SumReady(at)
        if self._announced != (at, exchange):
            self._announced = at, exchange
            self.events.write("sum_keys", **vars(at), of=exchange)
        self.link.send(SumUp(**state.addressed(at), exchange=exchange, body=keys))
        return None

    def _answer_sum(self, command: signals.SumStepped, state: SessionState) -> signals.Event | None:
        """Answer a step, or refuse what an honest coordinator does not ask for. A device that dealt shares but can't mask declines the round."""
        at, step, exchange = command.round_attempt, command.step, command.exchange
        keeper, sum_round = self._sums[exchange], self._sum_round(at, exchange)
        is_due = at == state.offered and state.sum_ready != at  # else it is already trained, or can't be trained
        if isinstance(step, SumOff):
            if is_due:
                reason = "too few devices answered in time, or the coordinator refused this device's announcement"
                self.events.write("sum_off", **vars(at), reason=reason)
            return signals.SumReady(at)
        try:
            if obstacle := self.store.sum_gate.obstacle(at.round):
                raise SumError(obstacle, "blocked")  # keys from before a restore, or for another secret
            if isinstance(step, SumOpened):
                keeper.opened(sum_round, step)
                found = keeper.found(sum_round)
                return None if found is None or not is_due else self._announce("parts", at, state, *found)
            if isinstance(step, SumDealt):
                keeper.dealt(sum_round, step)
                if exchange == "parts":
                    return signals.SumReady(at)
                answer: FromDevice = keeper.number(sum_round)
            else:
                answer = keeper.answer(sum_round, step)
        except WireError as error:
            self.events.write("refused", what="sum", **vars(at), detail=str(error))
            is_lost = isinstance(step, SumDealt) and exchange == "parts" and is_due
            self.why[DeclineReason.NO_SUM] = str(error)
            self._refuse_sum(at, exchange, SumObstacle(getattr(error, "why", "other")), state)
            return signals.RoundFailed(at, DeclineReason.NO_SUM) if is_lost else None
        self.link.send(SumUp(**state.addressed(at), exchange=exchange, body=answer))
        return None

    def _refuse_sum(self, at: RoundAttempt, exchange: SumExchange, why: SumObstacle, state: SessionState) -> None:
        """Notify the coordinator, so that it stops waiting for this device."""
        self.link.send(SumUp(**state.addressed(at), exchange=exchange, body=SumRefused(why=why)))

    def _sum_round(self, at: RoundAttempt, exchange: SumExchange) -> SumRound:
        return SumRound(self.config.federation, at.round, at.attempt, exchange)

    def _start_trainer(self, command: signals.StartTrainer, state: SessionState) -> signals.Event | None:
        try:
            pid = self.trainer.start()
        except OSError as error:  # no memory or process left: retried with longer pauses
            self.events.write("agent_error", detail=f"the training process can't be started: {error}")
            return signals.TrainerDied()
        self.events.write("trainer_started", pid=pid)
        return None

    def _start_job(
        self, command: signals.WeighRound | signals.TrainRound | signals.ChooseModel, state: SessionState
    ) -> signals.Event | None:
        if not self._is_sound(command.aggregate):
            return signals.ArtifactLost(command.aggregate)
        self.trainer.send(command)
        return None

    def _is_sound(self, artifact: str) -> bool:
        try:
            self.store.artifacts.get(artifact)
        except FileNotFoundError:
            return False  # pruned as old, but a restored coordinator returned to its round: it is fetched again
        except (IntegrityError, OSError) as error:
            self.events.write("refused", what="aggregate", detail=f"{error}. It will be fetched again")
            with contextlib.suppress(OSError):  # the new download replaces it
                self.store.artifacts.delete(artifact)
            return False
        return True

    def _record_delivery(self, command: signals.RecordDelivery, state: SessionState) -> None:
        round_attempt, outcome = command.round_attempt, command.outcome.value
        record = DeliveryRecord(command.artifact, round_attempt.round, round_attempt.attempt, outcome, command.reason)
        self.store.save_delivery(record)
        chunks_sent = self.transfer.carrier.end(command.artifact)
        if self._update is not None and (repeated := chunks_sent - self._update.ref.chunks) > 0:
            self.owner.traffic.sent(repeated * self._update.ref.chunk_bytes)
        self._update = None
        self.owner.sent.receipt(command.artifact, outcome)
        self.events.write("receipt", chunks_sent=chunks_sent, **asdict(record))

    def _record_reason(self, command: signals.RecordReason, state: SessionState) -> None:
        ended = self.store.save_reason(command.artifact, command.reason)
        if ended is not None:
            self.events.write("receipt", **asdict(ended))

    def _note(self, command: signals.Note, state: SessionState) -> None:
        at, about = command.round_attempt, {}
        if command.reason:
            about = {"reason": command.reason, "detail": self.why.get(DeclineReason(command.reason), "")}
        rounds = 0 if state.offer is None else state.offer.rounds
        self.events.write(command.event, **vars(at), rounds=rounds, **about)

    def _done(self, command: signals.Done, state: SessionState) -> None:
        self.outcome = command.succeeded
        end = describe_end(self.store.record(FINALISED_FILE), succeeded=command.succeeded)
        self.events.write("finished", succeeded=command.succeeded, summary=end)
