"""The agent: one loop that connects the coordinator link, artifact transfers, the training process and the state machine.

Other threads only put items into one bounded queue (`Inbox`). Everything else happens in `Agent.run`, which never waits for training.
Never imports torch.
"""

import logging
import os
import queue
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version

from edge_client.agent import owner
from edge_client.agent.command_executor import CommandExecutor
from edge_client.agent.hardware import HardwareWatch
from edge_client.agent.reports import EventReporter, SelfReporter, ServiceManager
from edge_client.config import AgentConfig
from edge_client.errors import EdgeError
from edge_client.identity.credentials import AgentKeys
from edge_client.link.artifact_transfer import ArtifactCarrier, ArtifactTransfer, Downloads, MqttCarrier
from edge_client.link.coordinator_link import CoordinatorLink, CoordinatorTrust, Handshake
from edge_client.link.https_client import https_carrier
from edge_client.session import signals
from edge_client.session.signals import Command, Input, LinkChanged, SendHello, given_up
from edge_client.session.state import REVOKED_RETRY_S, SessionState, TrainerState
from edge_client.session.state_machine import step
from edge_client.store.cohort_secret import mark_in
from edge_client.store.private_store import FINALISED_FILE, PrivateStore
from edge_client.training.trainer_handle import TrainerHandle, TrainerReport
from fedcg.errors import NOT_CONNECTED
from fedcg.event_log import EventLog
from fedcg.sentences import REVOKED_ADVICE
from fedcg.wire.messages.envelopes import PinnedKey
from fedcg.wire.messages.schemas import ArtifactRef, DeclineReason, Need, RoundAttempt
from fedcg.wire.messages.topics import Topics
from fedcg.wire.transfer.chunks import Chunk, chunk_bytes_for
from fedcg.wire.transfer.windows import Ranges
from fedcg.wire.transport.transport import Delivery, Transport
from fedcg.worker_process import Exited

INBOX_BYTES = 32 * 1024 * 1024
"""16 times a download's window. The loop is at most 0.25 s late, and a device may have only 2 GB of memory."""
ITEM_BYTES = 1024  # added to the content's size, so that empty items are bounded too


Item = Delivery | LinkChanged | Chunk | TrainerReport


class Inbox(queue.Queue[Item]):
    """A `queue.Queue` whose size is in bytes. One item may exceed the bound. The next one waits or is refused."""

    def __init__(self) -> None:
        super().__init__(INBOX_BYTES)

    def _init(self, maxsize: int) -> None:
        self._items: deque[Item] = deque()
        self._bytes = 0

    def _qsize(self) -> int:
        return self._bytes

    def _put(self, item: Item) -> None:
        self._items.append(item)
        self._bytes += _weight(item)

    def _get(self) -> Item:
        item = self._items.popleft()
        self._bytes -= _weight(item)
        return item


def _weight(item: Item) -> int:
    content = item.payload if isinstance(item, Delivery) else item.data if isinstance(item, Chunk) else b""
    return ITEM_BYTES + len(content)


IDLE_S = 0.25
DOWNLOADING_S = 0.05
OLDER_EVERY_S = 60.0  # between sessions ended by an older coordinator's status, which may be a replay
_log = logging.getLogger(__name__)


MakeTrainer = Callable[[Callable[[TrainerReport], None]], TrainerHandle]


class Agent:
    """One device's agent.

    Args:
        config: of this device.
        store: its private store, locked by the caller.
        keys: signing keys.
        transport: the broker connection, with the will from `offline_will`.
        make_trainer: builds the handle of the training process around a callback for its reports.
        events: the event log.
        clock: monotonic seconds.

    Raises:
        StoreError: the store has no intact generation, or the disk does not respond.

    Attributes:
        self_reporter: sends this device's self-reports.
        hardware: monitors the hardware.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: PrivateStore,
        keys: AgentKeys,
        transport: Transport,
        make_trainer: MakeTrainer,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._store = store
        self._transport = transport
        self._events = events
        self._clock = clock
        self._inbox = Inbox()
        self._dropped = 0
        self._older_at = float("-inf")
        self._stopping = False
        self._trainer = make_trainer(self._inbox.put)
        self._trust = CoordinatorTrust(store, config.federation, keys.coordinator)
        handshake = Handshake(
            config.federation,
            config.device,
            version("fedcg-edge"),
            cohort=mark_in(store, config.federation),
            heartbeat_s=config.broker.keepalive_s,
            carrier=config.carrier,
        )
        self._owner = owner.OwnerControl(config, store, events, time.time)
        on_sent = self._owner.sent.message
        self._link = CoordinatorLink(
            config.federation, config.device, keys.signing, transport, self._trust, handshake, on_sent
        )
        self._reporter = EventReporter(store.root, events, clock)
        self.hardware = HardwareWatch(config)
        self.self_reporter = SelfReporter(
            config.policy, store.root / "models", lambda: self.hardware.last_read, keepalive_s=config.broker.keepalive_s
        )
        https = https_carrier(config, self._put, events)
        mqtt = MqttCarrier(transport, Topics(config.federation).up_chunk(config.device), self._ask)
        carrier: ArtifactCarrier = mqtt if https is None else https
        self._reads_chunks = https is None
        window = config.broker.limits.window if https is None else None  # HTTPS has no broker queue
        downloads = Downloads(store.partials, window, config.policy.max_download_mb * 1_000_000)
        self._transfer = ArtifactTransfer(store, carrier, downloads, self._reporter.refusals, events)
        self._requests = owner.OwnerRequests(store.root)
        self._service = ServiceManager(os.environ, time.monotonic)
        self._executor = CommandExecutor(
            config, store, self._link, self._transfer, self._trainer, self._owner, self._chunk_bytes, events, clock
        )
        self._events_due: deque[Input] = deque()
        self._owners_reason: DeclineReason | None = None
        self._key = keys.signing.public.hex
        self._is_revoked = store.is_revoked(self._key)
        self._state = self._restored()

    def _restored(self) -> SessionState:
        """The session state restored from the store. Damage is reported."""
        generation, problems = self._store.generations.current()
        for problem in (*problems, *self._store.damage()):
            self._reporter.damage(problem)
        epoch, *highest = self._trust.order.highest
        committed = None if generation is None else generation.round_attempt
        final = self._store.record(FINALISED_FILE).get("aggregate")
        return SessionState(
            federation=self._config.federation,
            device=self._config.device,
            epoch=epoch,
            stored=frozenset(self._store.artifacts.ids()) | self._store.spec_digests(),
            bound_spec=None if generation is None else generation.spec,
            committed=committed,
            committed_epoch=epoch if committed is None or committed <= RoundAttempt(*highest) else 0,
            finalised=final if isinstance(final, str) else None,
        )

    def stop(self) -> None:
        """Make `run` return soon. May be called from a signal handler or another thread."""
        self._stopping = True

    def run(self, *, until_finished: bool = False) -> int:
        """Run until stopped or, with `until_finished`, until the federation is over.

        Returns:
            Exit code: 0; 1 if the federation is over and this device could not choose or export its model; 4 if it is revoked.
        """
        self._events.write(
            "agent_started",
            pid=os.getpid(),
            device=self._config.device,
            federation=self._config.federation,
            cohort_secret=self._store.cohort_secret() is not None,
        )
        try:
            with self._reporter.recording_errors(
                "control", "the owner's commands can't reach this agent: folder for requests"
            ):
                self._requests.open()
            self._heed_owner()
            self._handle(signals.Tick())  # start the training process early: it loads torch while the link connects
            self._transfer.start()
            self._link.subscribe(chunks=self._reads_chunks)
            if self._is_revoked:
                self._back_off()
            self._transport.start(self._on_delivery, lambda up: self._put(signals.LinkChanged(up)))
            self._service.ready()
            while not self._stopping and not (until_finished and self._is_over):
                self._turn()
                self._service.alive(owner.describe(self._state, self._reporter.progress))
            self._service.stopping()
            self._handle(signals.Stopping())
        finally:
            self._requests.close()
            self._transfer.carrier.close()
            self._link.status(online=False)
            self._transport.close()
            self._transfer.downloads.close()
            self._trainer.stop()
            self._owner.close()
            self._events.write(
                "agent_stopped", pid=os.getpid(), dropped=self._dropped, refused=self._reporter.refusals.counts
            )
        return NOT_CONNECTED if self._is_revoked else int(self._executor.outcome is False)

    @property
    def _is_over(self) -> bool:
        return self._executor.outcome is not None or self._is_revoked

    def _back_off(self) -> None:
        """Report the revocation once, and retry after a long time."""
        self._events.write("revoked", detail=REVOKED_ADVICE)
        self._transport.be_patient(REVOKED_RETRY_S)

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            self._inbox.put_nowait(delivery)
        except queue.Full:
            self._dropped += 1  # senders repeat unanswered messages

    def _put(self, item: signals.LinkChanged | Chunk) -> None:
        """Wait for room: link events are not repeated, and waiting stops reading chunks from the connection."""
        while not self._stopping:
            try:
                self._inbox.put(item, timeout=IDLE_S)
            except queue.Full:
                continue
            return

    def _turn(self) -> None:
        try:
            item = self._inbox.get(timeout=DOWNLOADING_S if self._transfer.downloads.are_pending else IDLE_S)
        except queue.Empty:
            item = None
        try:
            if item is not None:
                self._take(item)
            with self._reporter.recording_errors("control", "a request of the owner"):
                self._requests.answer_all(self._answer)
            self._heed_owner()
            if self._transport.is_refused and self._link.handshake.is_open:
                self._link.handshake.close()
                self._handle(signals.SessionLost(refused=True))
            if self._link.older_epoch is not None and self._link.handshake.is_open and self._clock() >= self._older_at:
                self._older_at = self._clock() + OLDER_EVERY_S
                self._link.handshake.close()
                self._handle(signals.SessionLost())  # the next hello names the epoch that this device knows
            self._download(lambda: self._transfer.keep_completed(self._state, self._clock()))
            self._handle(signals.Sending() if self._transfer.carrier.is_sending else signals.Tick())
            if self._link.handshake.is_open:
                self._download(lambda: self._transfer.ask(self._clock()))
            self.self_reporter.send_due(
                self._state, self._link, self._reporter.progress, self._owner.sent, self._clock()
            )
        except Exception as error:  # noqa: BLE001 - a run loop: logged with context, and the agent stays up
            self._fail("loop" if item is None else type(item).__name__, error)

    def _download(self, step: Callable[[], Input | None]) -> None:
        """Do a download step and handle its event. Errors are recorded, and the step is retried."""
        follows = None
        with self._reporter.recording_errors("download"):
            follows = step()
        self._handle(follows)

    def _fail(self, what: str, error: Exception) -> None:
        if isinstance(error, OSError):
            self._reporter.disk_failed(re.sub("(?<=[a-z])(?=[A-Z])", " ", what).lower(), error)
            return
        if isinstance(error, EdgeError):  # its message names the next step
            self._events.write("agent_error", detail=f"{what}: {error}")
            return
        _log.exception("the agent of %s failed at %s", self._config.device, what, exc_info=error)
        self._events.write("agent_error", detail=f"{what}: {type(error).__name__}: {error}")

    def _take(self, item: Item) -> None:
        if isinstance(item, Delivery):
            self._receive(item)
        elif isinstance(item, signals.LinkChanged):
            self._link_changed(item)
        elif isinstance(item, Chunk):
            self._take_chunk(item)
        else:
            self._trainer_reported(item)

    def _heed_owner(self) -> None:
        """Apply the owner's decisions on training new rounds."""
        reason = self._code(self._owner.obstacle(self._state))
        if reason is not self._owners_reason:
            self._owners_reason = reason
            self.self_reporter.is_paused = reason is DeclineReason.PAUSED
            self._handle(signals.ObstacleChanged(reason))

    def _answer(self, request: owner.OwnerRequest) -> owner.Reply:
        reply = self._owner.answer(request, self._state, self._reporter.progress)
        if reply["ok"] and isinstance(request, owner.PauseRequest) and request.now and self._state.job is not None:
            self._heed_owner()
            self._reporter.progress = None
            self._trainer.stop()
            self._adopt_commit()  # it may have died after its commit and before its report
            self._handle(signals.TrainingAbandoned())
        elif reply["ok"] and isinstance(request, owner.DecisionRequest):
            delivery, is_withheld = self._state.delivery, not self._owner.outbox_may_leave(self._reporter)
            if is_withheld and delivery is not None and delivery.update is not None:
                self._transfer.carrier.end(delivery.update.id)
            self._handle(signals.ConsentChanged(is_withheld=is_withheld))
        return reply

    def _handle(self, event: Input | None) -> None:
        if event is None:
            return
        if isinstance(event, signals.Invited):  # an obstacle: the owner's decision, or the hardware
            found = self._owner.obstacle(self._state)
            found = found or self.hardware.decline(event, self._state.offer, self._clock())
            self._events_due.append(signals.ObstacleChanged(self._code(found)))
            event = replace(event, predicted_s=self.hardware.predicted_s(event.share))
        self._events_due.append(event)
        while self._events_due:
            due = self._events_due.popleft()
            self._reporter.report(due)
            if isinstance(due, signals.Revoked | signals.Welcomed):
                self._follow_standing(due)
            if isinstance(due, signals.Welcomed):
                self.self_reporter.repeat()
                self.hardware.welcomed(due.server_time, self._clock())
            self._state, commands = step(self._state, due, self._clock())
            for command in commands:
                self._carry_out(command)

    def _follow_standing(self, statement: signals.Revoked | signals.Welcomed) -> None:
        """Store whether the coordinator has revoked this device, if that has changed."""
        is_revoked = isinstance(statement, signals.Revoked)
        if is_revoked is self._is_revoked:
            return
        self._is_revoked = is_revoked
        with self._reporter.recording_errors("revocation", "the coordinator's statement about this device"):
            self._store.save_revoked(self._key, revoked=is_revoked)
        if is_revoked:
            self._back_off()
        else:
            self._transport.be_patient(0.0)

    def _carry_out(self, command: Command) -> None:
        if isinstance(command, SendHello):
            self._reporter.hello(self._link.why_refused)
        try:
            follows = self._executor.carry_out(command, self._state)
        except Exception as error:  # noqa: BLE001 - the following commands must still run: they are not repeated
            self._fail(type(command).__name__, error)
            follows = given_up(command)
        if follows is not None:
            self._events_due.append(follows)

    def _code(self, found: owner.Refusal | None) -> DeclineReason | None:
        """The decline code, which may leave the device. The explanation stays here."""
        if found is None:
            return None
        reason, self._executor.why[found[0]] = found
        return reason

    def _take_chunk(self, chunk: Chunk) -> None:
        with self._reporter.recording_errors("download"):
            self._transfer.downloads.feed(chunk, self._clock())
            self._owner.traffic.received(len(chunk.data))

    def _receive(self, delivery: Delivery) -> None:
        meaning = None
        with self._reporter.recording_errors(self._link.name_of(delivery)):
            meaning = self._link.open(delivery)
            if isinstance(meaning, Chunk):
                self._take_chunk(meaning)
                return
        # The message is used even if this fails: a broadcast is not repeated.
        with self._reporter.recording_errors("memory", "the stored state of the coordinator"):
            self._trust.save()
        if isinstance(meaning, PinnedKey):
            self._events.write("coordinator_key", serial=meaning.serial, key=meaning.key.hex)
            self._link.ask_for_broadcasts()
        else:
            self._handle(meaning)

    def _ask(self, ref: ArtifactRef, ranges: Ranges) -> None:
        """Ask the coordinator to send chunks of an artifact over the broker."""
        self._link.send(Need(**self._state.addressed(), artifact=ref.id, ranges=ranges))

    def _chunk_bytes(self) -> int:
        """The chunk size that fits the link."""
        return chunk_bytes_for(self._transport.max_payload, self._config.broker.limits.chunk_bytes)

    def _link_changed(self, event: signals.LinkChanged) -> None:
        self._link.handshake.close()
        self._reporter.link(up=event.up)
        try:
            if event.up:
                self._link.status(online=True)
                self._find_outbox()
        finally:
            self._handle(event)

    def _find_outbox(self) -> None:
        generation = self._store.generations.newest()
        entry = None if generation is None else self._store.outbox(generation)
        if entry is not None and self._owner.outbox_may_leave(self._reporter):
            self._handle(signals.OutboxFound(entry.round_attempt))

    def _trainer_reported(self, report: TrainerReport) -> None:
        if isinstance(report, signals.Noted):
            self._reporter.noted(report)
            self.hardware.noted(report.event)
            if report.event["event"] == "exported":
                self.self_reporter.look_at_model()
            return
        if isinstance(report, Exited):
            self._trainer_ended(report)
            return
        self._reporter.progress = None
        if isinstance(report, signals.RoundFailed):
            self._reporter.failed(report)
            self._executor.why[report.reason] = report.detail
        elif isinstance(report, signals.Chosen):
            self.self_reporter.look_at_model()
        self._handle(report)  # before pruning, which may fail with a disk error
        offer = self._state.offer
        if (
            isinstance(report, signals.RoundFailed)
            and report.reason is DeclineReason.NEEDS_APPROVAL
            and offer is not None
        ):
            checked = self._executor.carry_out(
                signals.CheckSpec(offer.spec.id), self._state
            )  # the program changed: asks for approval
            assert checked is not None
            self._handle(checked)
        if isinstance(report, signals.RoundCommitted):
            self._prune()

    def _trainer_ended(self, report: Exited) -> None:
        if report.exit_code == 0 and self._state.trainer is TrainerState.GONE:
            self._events.write("trainer_released", reason=self._state.release_reason)
            return
        self._reporter.died(report)
        self._executor.why[DeclineReason.TRAINING_FAILED] = f"the training process ended with code {report.exit_code}"
        try:
            self._adopt_commit()  # it may have died after its commit and before its report
        finally:
            self._handle(signals.TrainerDied())

    def _adopt_commit(self) -> None:
        generation = self._store.generations.newest()
        if generation is None or (
            self._state.committed is not None and generation.round_attempt <= self._state.committed
        ):
            return
        self._handle(signals.RoundCommitted(generation.round_attempt, generation.spec))
        self._prune()

    def _prune(self) -> None:
        targets = (self._state.offer, self._state.finished)
        self._store.prune_artifacts({target.aggregate.id for target in targets if target is not None})
