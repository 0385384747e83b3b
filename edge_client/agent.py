"""The agent: a thin loop between transport, training process, private store and the protocol's state machine. Never imports torch.

Other threads only put into one bounded queue; everything else happens in `Agent.run`, which never waits for training.
"""

from __future__ import annotations

import logging
import os
import queue
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version

from edge_client.actions import Actions
from edge_client.cohort import mark_of
from edge_client.config import AgentConfig
from edge_client.downloads import Downloaded, Downloads
from edge_client.errors import FirewallError
from edge_client.firewall import check_kept
from edge_client.handshake import Handshake
from edge_client.incoming import Incoming
from edge_client.outgoing import Outgoing
from edge_client.private_store import DeliveryRecord, PrivateStore
from edge_client.session import step
from edge_client.session_events import (
    ArtifactStored,
    Command,
    DownloadSilent,
    Event,
    Finalised,
    Invited,
    LinkChanged,
    Offered,
    OutboxFound,
    RoundCommitted,
    RoundFailed,
    Sending,
    Tick,
    TrainerDied,
    TrainerReady,
    Welcomed,
)
from edge_client.session_state import SessionState, next_deadline
from edge_client.trainer_process import (
    Chosen,
    Committed,
    Exited,
    Failed,
    Ready,
    TrainerHandle,
    TrainerReport,
)
from fedcg.event_log import EventLog
from fedcg.refusals import Refusals
from fedcg.wire.channel import BroadcastOrder
from fedcg.wire.errors import WireError
from fedcg.wire.messages import COORDINATOR, CohortVerdict, Heartbeat, Need
from fedcg.wire.signing import SigningKey, VerifyKey
from fedcg.wire.transport import Delivery, Transport

INBOX_MAX = 2048  # at most 250 MB of chunks; what does not fit is asked for again
IDLE_S = 0.25
DOWNLOADING_S = 0.05
WITHHELD = "withheld"  # how an update ended that its owner forbade after it was made
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LinkReport:
    """The transport's word on the link."""

    up: bool


@dataclass(frozen=True)
class AgentKeys:
    """This device's signing key, and the coordinator's public key."""

    signing: SigningKey
    coordinator: VerifyKey


MakeTrainer = Callable[[Callable[[TrainerReport], None]], TrainerHandle]
_Item = Delivery | LinkReport | TrainerReport


class Agent:
    """One device's agent.

    Args:
        config: of this device.
        store: its private store, locked by the caller.
        keys: for signatures.
        transport: the link to the broker, with the will of `outgoing.offline_will`.
        make_trainer: builds the handle of the training process around a callback for its reports.
        events: the event log.
        clock: monotonic seconds.
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
        self._inbox: queue.Queue[_Item] = queue.Queue(INBOX_MAX)
        self._dropped = 0
        self._refusals = Refusals(events)
        self._stopping = False
        self._trainer = make_trainer(self._inbox.put)
        self._order = BroadcastOrder(store.seen())
        secret = store.cohort_secret()
        self._handshake = Handshake(
            config.federation,
            config.device,
            version("fedcg-edge"),
            cohort=None if secret is None else mark_of(secret, config.federation),
            heartbeat_s=config.broker.keepalive_s,
        )
        self._beat_at = float("-inf")
        limits = config.broker.limits
        self._downloads = Downloads(store.partials, limits.window)
        self._outgoing = Outgoing(
            config.federation, config.device, keys.signing, transport, self._handshake, limits.chunk_bytes
        )
        self._incoming = Incoming(
            config.federation, config.device, keys.coordinator, self._order, self._handshake, self._downloads
        )
        self._actions = Actions(config, store, self._outgoing, self._downloads, self._trainer, events, clock)
        self._events_due: deque[Event] = deque()
        self._cohort = CohortVerdict.ALONE
        self._state = self._restored()

    def stop(self) -> None:
        """End `run` soon; may be called from a signal handler or another thread."""
        self._stopping = True

    def run(self, *, until_finished: bool = False) -> int:
        """Work until stopped, or until the federation is over when `until_finished` is set.

        Returns:
            0; or 1 when the federation is over and this device could not choose or export its model.
        """
        cohort = self._store.cohort_secret() is not None
        self._events.write(
            "agent_started",
            pid=os.getpid(),
            device=self._config.device,
            federation=self._config.federation,
            cohort_secret=cohort,
        )
        try:
            self._handle(Tick())  # starts the training process: it loads torch while the link comes up
            self._store.partials.collect()
            self._outgoing.start()
            self._outgoing.subscribe()
            self._transport.start(self._on_delivery, self._on_link)
            while not self._stopping and not (until_finished and self._actions.outcome is not None):
                self._turn()
        finally:
            self._outgoing.close()
            self._outgoing.status(online=False)
            self._transport.close()
            self._downloads.close()
            self._trainer.stop()
            self._events.write("agent_stopped", pid=os.getpid(), dropped=self._dropped, refused=self._refusals.counts)
        return 1 if self._actions.outcome is False else 0

    # -------------------------------------------------------------- other threads: enqueue, nothing else

    def _on_delivery(self, delivery: Delivery) -> None:
        try:
            self._inbox.put_nowait(delivery)
        except queue.Full:
            self._dropped += 1  # every sender repeats what was not answered

    def _on_link(self, up: bool) -> None:
        while not self._stopping:  # unlike a delivery, nobody repeats this: wait for room
            try:
                self._inbox.put(LinkReport(up), timeout=IDLE_S)
            except queue.Full:
                continue
            return

    # -------------------------------------------------------------- the loop

    def _turn(self) -> None:
        try:
            item = self._inbox.get(timeout=self._patience())
        except queue.Empty:
            item = None
        try:
            if item is not None:
                self._take(item)
            self._keep_completed()
            self._handle(Sending() if self._outgoing.is_sending else Tick())
            self._ask()
            self._beat()
        except Exception as error:  # noqa: BLE001 - a run loop: logged with context, and the agent stays up
            _log.exception("the agent of %s failed at %s", self._config.device, type(item).__name__)
            self._events.write("agent_error", detail=f"{type(error).__name__}: {error}")

    def _patience(self) -> float:
        due = next_deadline(self._state)
        longest = DOWNLOADING_S if self._downloads.are_pending else IDLE_S
        return longest if due is None else max(0.0, min(longest, due - self._clock()))

    def _take(self, item: _Item) -> None:
        if isinstance(item, Delivery):
            self._receive(item)
        elif isinstance(item, LinkReport):
            self._link_changed(item.up)
        else:
            self._hear_trainer(item)

    def _handle(self, event: Event) -> None:
        self._events_due.append(event)
        while self._events_due:
            due = self._events_due.popleft()
            self._tell(due)
            self._state, commands = step(self._state, due, self._clock())
            for command in commands:
                self._carry_out(command)

    def _carry_out(self, command: Command) -> None:
        try:
            follows = self._actions.carry_out(command, self._state)
        except OSError as error:  # a full disk must not take the commands after this one along: nobody gives them again
            self._stumble(type(command).__name__, error)
            return
        if follows is not None:
            self._events_due.append(follows)

    def _receive(self, delivery: Delivery) -> None:
        highest = self._order.highest
        try:
            meaning = self._incoming.open(delivery, self._clock())
        except WireError as error:
            self._refusals.note(delivery.topic, error)
            return
        except OSError as error:
            self._stumble("a download", error)
            return
        if self._order.highest != highest:
            try:
                self._store.save_seen(self._order.highest)
            except OSError as error:  # the message counts all the same: a broadcast is not repeated
                self._stumble("seen.json", error)
        if meaning is not None:
            self._handle(meaning)

    def _keep_completed(self) -> None:
        try:
            download = self._downloads.completed(self._clock())
        except WireError as error:
            self._refusals.note("download", error)
            return
        except OSError as error:
            self._stumble("a download", error)
            return
        if download is not None:
            self._keep(download)

    def _keep(self, download: Downloaded) -> None:
        try:
            if download.what == "spec":
                self._store.save_spec(download.file.read_bytes())
            else:
                self._store.artifacts.adopt(download.file, download.artifact)
        except ValueError as error:  # not a spec: the check that follows refuses it
            self._refusals.note("spec", error)
        except OSError as error:
            self._downloads.failed(download.artifact, self._clock())  # a full disk: tried again when there is room
            self._stumble("a download", error)
            return
        self._downloads.kept(download.artifact)
        self._events.write(
            "artifact_stored",
            artifact=download.artifact,
            what=download.what,
            bytes=download.size,
            resumed=download.resumed,
            received=download.fresh,
            repeated=download.repeated,
            seconds=round(download.seconds, 3),
            round=0 if self._state.offer is None else self._state.offer.round,
            final=self._state.finished is not None,
        )
        self._handle(ArtifactStored(download.artifact))

    def _link_changed(self, up: bool) -> None:
        self._handshake.close()
        self._events.write("link", up=up)
        if up:
            self._outgoing.status(online=True)
            try:
                self._find_outbox()
            finally:
                self._handle(LinkChanged(up))
            return
        self._handle(LinkChanged(up))

    def _find_outbox(self) -> None:
        generation, _ = self._store.generations.current()
        entry = self._store.outbox(generation)
        if generation is None or entry is None:
            return
        try:
            check_kept(self._store.generations.update_bytes(generation), self._config.policy, self._config.device)
        except FirewallError as error:
            self._refusals.note("outbox", error)
            cursor = entry.cursor
            self._store.save_delivery(
                DeliveryRecord(entry.artifact, cursor.round, cursor.attempt, WITHHELD, str(error))
            )
            return
        self._handle(OutboxFound(entry.cursor, self._actions.load_update()))

    def _hear_trainer(self, report: TrainerReport) -> None:
        if isinstance(report, Ready):
            self._handle(TrainerReady())
        elif isinstance(report, Committed):
            self._adopt_commit()
        elif isinstance(report, Failed):
            about = {"round": report.cursor.round, "attempt": report.cursor.attempt}
            self._events.write("round_failed", **about, reason=report.reason.value, detail=report.detail)
            self._handle(RoundFailed(report.cursor, report.reason))
        elif isinstance(report, Chosen):
            self._handle(Finalised(report.aggregate, report.succeeded))
        elif isinstance(report, Exited):
            self._events.write("trainer_died", pid=report.pid, exit_code=report.exit_code)
            try:
                self._adopt_commit()  # it may have died between its commit and its report
            finally:
                self._handle(TrainerDied())

    def _adopt_commit(self) -> None:
        generation, _ = self._store.generations.current()
        if generation is None or (self._state.committed is not None and generation.cursor <= self._state.committed):
            return
        self._handle(RoundCommitted(generation.cursor, generation.spec, self._actions.load_update()))
        targets = (self._state.offer, self._state.finished)
        self._store.prune_artifacts({target.aggregate.id for target in targets if target is not None})

    def _ask(self) -> None:
        now = self._clock()
        if not self._handshake.is_open:
            return
        target = self._state.offer or self._state.finished
        try:
            needs = list(self._downloads.needs(now))
        except OSError as error:
            self._stumble("a download", error)
            return
        for artifact, ranges in needs:
            self._outgoing.send(
                Need(
                    federation=self._config.federation,
                    sender=self._config.device,
                    recipient=COORDINATOR,
                    epoch=self._state.epoch,
                    round=0 if target is None else target.round,
                    attempt=0 if target is None else target.attempt,
                    artifact=artifact,
                    ranges=ranges,
                )
            )
        if self._downloads.is_silent(now):
            self._handle(DownloadSilent())

    def _beat(self) -> None:
        """Be heard now and then: a will is lost when a broker dies with this device."""
        now = self._clock()
        if self._handshake.is_open and now - self._beat_at >= self._config.broker.keepalive_s:
            self._beat_at = now
            self._outgoing.send(
                Heartbeat(federation=self._config.federation, sender=self._config.device, recipient=COORDINATOR)
            )

    def _restored(self) -> SessionState:
        generation, problems = self._store.generations.current()
        for problem in problems:
            self._events.write("refused", what="store", detail=problem)
            _log.error("%s: %s", self._store.root, problem)
        final = self._store.finalised().get("aggregate")
        return SessionState(
            federation=self._config.federation,
            device=self._config.device,
            epoch=self._order.highest[0],
            stored=frozenset(self._store.artifacts.ids()) | self._store.spec_digests(),
            bound_spec=None if generation is None else generation.spec,
            committed=None if generation is None else generation.cursor,
            finalised=final if isinstance(final, str) else None,
        )

    def _tell(self, event: Event) -> None:
        if isinstance(event, Welcomed | Invited):
            self._tell_cohort(event.cohort)
        if isinstance(event, Welcomed):
            self._events.write("welcomed", epoch=event.epoch)
        elif isinstance(event, Offered):
            self._events.write("offer", round=event.offer.round, attempt=event.offer.attempt, live=event.live)
        elif isinstance(event, Invited):
            self._events.write("invited", round=event.cursor.round, attempt=event.cursor.attempt)

    def _tell_cohort(self, verdict: CohortVerdict) -> None:
        if verdict is CohortVerdict.DIFFERENT and self._cohort is not CohortVerdict.DIFFERENT:
            _log.warning(
                "%s: other devices have another cohort secret, so private networks start apart and merge badly; compare "
                "`fedcg cohort status` on all devices",
                self._config.device,
            )
        if verdict is not self._cohort:
            self._cohort = verdict
            self._events.write("cohort", others=verdict.value)

    def _stumble(self, what: str, error: OSError) -> None:
        _log.error(
            "%s: %s failed: %s. Free space on, or repair, %s", self._config.device, what, error, self._store.root
        )
        self._events.write("agent_error", detail=f"{what}: {error}")
