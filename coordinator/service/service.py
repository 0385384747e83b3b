"""The service of a federation: one loop processes a single queue in order, and the round engine decides.

Updates arrive on the receiver's thread, and torch runs in the aggregation worker. A failure in this module ends the service. The database
has the complete state, and a restarted coordinator resumes the same attempt.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from sqlalchemy.exc import SQLAlchemyError

from coordinator.aggregation.jobs import Reply
from coordinator.messaging.incoming import Cohorts, EventQueue, FloodLimits, FromDevice, MessageChecks, Sessions
from coordinator.messaging.publisher import Publisher, status_will
from coordinator.rounds.engine import Phase, RoundState
from coordinator.rounds.records import FederationRecord
from coordinator.rounds.signals import LinkChanged, Tick, UpdateRefused, UpdateStored
from coordinator.service.devices import REFRESH_S, REMIND_S, Invitations, Liveness, MemberRefresh, PresenceLog
from coordinator.service.reports import ConditionBoard, DeviceProgress, ProgressBoard
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import ServiceContext
from coordinator.sums import SealedSums
from coordinator.updates.published_artifacts import ArtifactRequests, PublishedArtifacts
from coordinator.updates.receiver import Broken, Receiver
from coordinator.updates.update_checks import UpdateChecks
from fedcg.errors import in_words
from fedcg.wire.errors import CapacityError, Refusals, VersionError
from fedcg.wire.messages import schemas
from fedcg.wire.messages.topics import ANY_DEVICE, TopicKind, Topics
from fedcg.wire.transport.transport import Delivery
from fedcg.worker_process import Exited

TICK_S = 0.25
STRANGER_REFRESH_S = 1.0
OFFER_EVERY_S = 30.0
"""Interval to repeat a retained offer or end that a broker may lose; costs as much traffic as heartbeats."""
LEAVE_AFTER_S = 5.0
LEAVE_AT_LATEST_S = 60.0
CLOSE_TIMEOUT_S = 2.0
STEER_TIMEOUT_S = 30.0

_Item = Delivery | Reply | Exited | UpdateStored | UpdateRefused | Broken | LinkChanged | Callable[[], None]

log = logging.getLogger(__name__)


class Service:
    """Serves one federation: `start` and `run` on one thread, then `close`.

    Attributes:
        context: its dependencies.
        epoch: number of the lease.
        published: the artifacts that devices may fetch.
        receiver: receives updates; `invitations` keeps the devices' answers.
        sums: the sealed sums of its rounds.
        round_driver: drives the rounds; has the running or last merge, and the worker's process.
        floods: the temporarily silenced devices.
        conditions: the devices' self-reports.
        cohorts: the marks of cohort secrets from the devices' hellos.
        is_connected: whether the link to the broker is up.
        store_problem: why rounds wait for the store of artifacts; empty while it is available.
        finished_and_left: set once the federation is over and its devices have left, or a minute later.
    """

    def __init__(self, context: ServiceContext) -> None:
        topics = Topics(context.federation.id)
        self.epoch = context.store.next_epoch()
        self.finished_and_left = threading.Event()
        self._stopping = threading.Event()
        self.context = context
        self._events = context.events
        self._queue: EventQueue[_Item] = EventQueue()
        self._sessions = Sessions()
        self.cohorts = Cohorts()
        self._refusals = Refusals(context.events)
        self._message_checks = MessageChecks(topics, self._sessions, self._refusals)
        signing_identity = context.signing_identity()
        self._transport = context.connect(status_will(topics, self.epoch, signing_identity.key))
        self._publisher = Publisher(
            self._transport, topics, signing_identity, self.epoch, self._sessions, self.cohorts, context.limits
        )
        self.published = PublishedArtifacts(context.artifacts, self._publisher.chunk_bytes)
        self._worker = context.make_worker(context.worker, self._queue.put)
        self.receiver = Receiver(
            UpdateChecks(context.spec, context.store, context.artifacts, context.clock),
            context.artifacts.root / ".partial" / context.federation.id,  # `clear` concerns only one federation
            context.limits,
            self._publisher,
            context.events,
            self._refusals,
            self._queue.put,
        )
        self.sums = SealedSums(
            context.spec, context.store, self._publisher, context.events, time.monotonic, self._message_checks.knows
        )
        self.round_driver = RoundDriver(
            context, self._publisher, self.published, self._worker, self.receiver, self.sums
        )
        self.invitations = Invitations(context, self.round_driver, self._publisher, self.receiver)
        self._readers = ThreadPoolExecutor(1, "artifacts")
        read = partial(self._run_on, self._readers)
        self._requests = ArtifactRequests(self.published, self._publisher.chunks, read)
        self._presence = PresenceLog(context.store, context.federation.id, context.clock)
        self._liveness = Liveness(self.round_driver, self.receiver, context.events, self._presence)
        self._members_pool = ThreadPoolExecutor(1, "members")
        self._members = MemberRefresh(
            context,
            self._message_checks,
            self.receiver,
            self.round_driver,
            self._publisher,
            self.cohorts,
            self._liveness,
            partial(self._run_on, self._members_pool),
        )
        self.floods = FloodLimits()
        self._topics = topics
        self._board = ProgressBoard()
        self.conditions = ConditionBoard(context.store, context.federation.id)
        self._down_since: float | None = None
        self._key_read_at = 0.0
        self._finished_at: float | None = None
        self.is_connected = False
        self.store_problem = ""

    @property
    def state(self) -> RoundState:
        """The state of the federation."""
        return self.round_driver.state

    @property
    def refusals(self) -> dict[str, int]:
        """Messages refused since the start, by reason, including messages dropped because of the rate."""
        return {**self._refusals.counts, "dropped": self._queue.dropped + self.receiver.dropped}

    def refused_of(self, device: str) -> int:
        """Messages of a device refused since the start."""
        return self._refusals.of(device)

    @property
    def progress(self) -> dict[str, DeviceProgress]:
        """Training progress of online participants that have not delivered; thread-safe."""
        return self._board.of(self.state)

    def start(self) -> None:
        """Rebuild the state and connect. The worker starts when a round opens, to save memory and CPUs that devices may need."""
        self._presence.prune()
        self._presence.lose_sight("the coordinator was restarted")
        self._members.refresh()
        self.round_driver.restart()
        self._members.drop_strangers()
        for topic_of in (self._topics.up_control, self._topics.up_chunk, self._topics.status):
            self._transport.subscribe(topic_of(ANY_DEVICE))
        self.receiver.start()
        self._publisher.sender.start()
        self._transport.start(self._on_delivery, lambda up: self._queue.put(LinkChanged(up)))
        self._events.write("started", epoch=self.epoch)

    def run(self) -> None:
        """Run until `stop` is called. Any exception must end the process; a restart resumes from the database."""
        ticked_at = time.monotonic()
        while not self._stopping.is_set():
            item = self._queue.get(TICK_S)
            if item is not None:
                self._handle(item)
            if time.monotonic() - ticked_at >= TICK_S:
                ticked_at = time.monotonic()
                self._tick()

    def steer(self, record: FederationRecord, *, resume: bool = False) -> None:
        """Apply an operator's changes to the federation or its devices, and wait until done. Call from another thread."""
        done: Future[None] = Future()

        def follow() -> None:
            self._members.refresh()
            self.round_driver.follow(record, resume=resume)
            done.set_result(None)

        self._queue.put(follow)
        done.result(STEER_TIMEOUT_S)

    def stop(self) -> None:
        """Make `run` return; thread-safe."""
        self.context.artifacts.stop_waiting()
        self._queue.put(self._stopping.set)

    def close(self) -> None:
        """Publish that this coordinator is offline, and stop worker and transport, which may hang. Call after `run` returned."""
        self._publisher.status(online=False)
        closing = [
            threading.Thread(target=_close, args=(work,), name="closing", daemon=True)
            for work in (
                partial(self._presence.lose_sight, "the coordinator was stopped"),
                self._publisher.sender.close,
                self.receiver.close,
                self._transport.close,
                self._worker.stop,
            )
        ]
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join(max(0.0, deadline - time.monotonic()))
        for pool in (self._readers, self._members_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        self._events.write("stopped", epoch=self.epoch)

    def _on_delivery(self, delivery: Delivery) -> None:
        """On the transport's thread: only count and enqueue."""
        device, kind = self._message_checks.origin(delivery)
        is_chunk = kind is TopicKind.UP_CHUNK
        if is_chunk and self.receiver.frame(device, delivery.payload):
            return
        if not self.floods.admits(device, kind):
            self._refusals.note(
                self._message_checks.name_of(delivery), CapacityError("more messages than a device may send"), device
            )
        elif not is_chunk:
            self._queue.put(delivery, max(1, len(delivery.payload)), device)

    def _handle(self, item: _Item) -> None:
        if isinstance(item, Delivery):
            self._delivered(item)
        elif isinstance(item, LinkChanged):
            self._link_changed(item)
        elif isinstance(item, UpdateStored):
            if self.state.is_open(item.at):
                self._worker.add(item.client, item.artifact)
            self.round_driver.apply(item)
        elif isinstance(item, UpdateRefused):
            self.round_driver.apply(item)
        elif isinstance(item, Broken):
            raise item.error
        elif callable(item):
            item()
        else:
            for event in self._worker.follow(item):
                self.round_driver.follow_worker(event)

    def _delivered(self, delivery: Delivery) -> None:
        device, _ = self._message_checks.origin(delivery)
        if self.floods.is_silenced(device):
            return
        if not device and self._members.is_older_than(STRANGER_REFRESH_S):
            self._members.refresh()  # it may have enrolled since the start
        incoming = self._message_checks.open(delivery)
        if incoming is not None:
            self._message(incoming)

    def _message(self, incoming: FromDevice) -> None:
        device, message = incoming.device, incoming.message
        self._liveness.mark_seen(device, time.monotonic())
        if isinstance(message, schemas.DeviceStatus):
            if not message.online:
                self._liveness.mark_offline(device, "it ended its session, or the broker lost it", time.monotonic())
        elif isinstance(message, schemas.Hello):
            self._hello(device, message)
        elif isinstance(message, schemas.Leave):
            self._members.leaves(device)
        else:
            if not self._liveness.is_online(device):
                self._liveness.mark_online(device)
            self._in_session(device, message)

    def _in_session(
        self,
        device: str,
        message: schemas.Heartbeat
        | schemas.SelfReport
        | schemas.Accept
        | schemas.Decline
        | schemas.Manifest
        | schemas.Need
        | schemas.SumUp,
    ) -> None:
        if isinstance(message, schemas.Accept | schemas.Decline):
            self.invitations.answered(device, message)
        elif isinstance(message, schemas.Heartbeat):
            if message.phase is None or (self.state.is_open(message.at) and device in self.state.outstanding):
                now = self.context.clock()
                if self._board.note(device, message, now):
                    self.context.store.started_training(self.context.federation.id, message.at, device, now)
        elif isinstance(message, schemas.SelfReport):
            self.conditions.note(device, message, self.context.clock(), is_delayed=self.receiver.is_busy(device))
        elif isinstance(message, schemas.Manifest):
            self.receiver.announce(device, message)
        elif isinstance(message, schemas.Need):
            self._requests.serve(device, message)
        else:
            self.sums.receive(device, message)

    def _hello(self, device: str, hello: schemas.Hello) -> None:
        version = schemas.agree(hello.versions)
        if version is None:
            reason = schemas.explain_versions(hello.versions, schemas.SPOKEN)
            self._refusals.note(f"the hello of {device}", VersionError(reason), device)
            self._publisher.refuse_hello(device, hello)
            return
        if hello.check:
            self._publisher.welcome(device, hello.nonce, secrets.token_hex(16), self.context.clock(), version)
            return
        self.conditions.remembered[device] = hello.epoch, hello.round, self._publisher.has_key(hello.key)
        if hello.epoch > self.epoch:  # it refuses all messages of this coordinator
            self._liveness.mark_offline(device, "it has a later epoch than this coordinator", time.monotonic())
            return
        nonce = self._sessions.greet(device, hello.nonce, hello.carrier)
        self.invitations.forget(device)
        now = self.context.clock()
        self.context.store.saw_device(device, now, hello.agent)
        if unlike := self.cohorts.note(device, hello.cohort):
            self._events.write("cohort_differs", client=device, unlike=",".join(unlike))
            if self.round_driver.requires_cohort_secret:
                self._members.refresh()  # before a round opens, not seconds later
        self._publisher.welcome(device, hello.nonce, nonce, now, version)
        self._liveness.expect(device, hello.heartbeat_s, time.monotonic())
        self._liveness.mark_online(device)

    def _link_changed(self, change: LinkChanged) -> None:
        now = time.monotonic()
        down_s = round(now - self._down_since, 1) if change.up and self._down_since is not None else None
        self._down_since = None if change.up else now
        self._events.write("link", up=change.up, down_s=down_s)
        if not change.up:
            self.is_connected = False
            self.round_driver.apply(change)
            return
        self._liveness.pardon(now)
        self.sums.link_is_back()
        self.published.change_chunk_bytes(self._publisher.chunk_bytes)
        self._publisher.keys()
        self._publisher.status(online=True)
        self._members.publish_lists()
        self._members.tell_revoked()
        self.is_connected = True
        if not self.store_problem:
            self.round_driver.apply(change)
        self.round_driver.announce()
        self.invitations.remind()

    def _tick(self) -> None:
        self.receiver.tick()
        self._worker.tick()
        self._follow_store()
        self.round_driver.apply(Tick())
        now = time.monotonic()
        if self.is_connected and (not self.round_driver.is_announced or self._is_offer_due(now)):
            self.round_driver.announce()  # the queue was full, or a device may have missed it
        self._members.tick(self.floods.silenced())
        if now - self._key_read_at >= REFRESH_S:
            self._key_read_at = now
            self._follow_key()
        if self.is_connected:
            self._liveness.miss_silent(now)
            self.sums.tick(self.state.outstanding)
        self.invitations.remind(REMIND_S)
        if self.state.phase is not Phase.FINISHED:
            return
        if self._finished_at is None:
            self._finished_at = now
            self._worker.stop()  # it uses memory and a GPU
        since = now - self._finished_at
        if since >= LEAVE_AT_LATEST_S or (since >= LEAVE_AFTER_S and not self.state.online):
            self.finished_and_left.set()

    def _follow_store(self) -> None:
        """Suspend the deadline while updates can't be stored durably."""
        before, self.store_problem = self.store_problem, self.context.artifacts.problem
        if bool(before) != bool(self.store_problem):
            self._events.write("artifact_store", reachable=bool(before), reason=self.store_problem)
            up = self.is_connected and bool(before)
            self.round_driver.apply(LinkChanged(up, "store of artifacts"))

    def _is_offer_due(self, now: float) -> bool:
        is_over = self.state.phase is Phase.FINISHED and bool(self.state.online)
        is_wanted = is_over or (self.state.phase is Phase.COLLECTING and bool(self.invitations.unanswered))
        return is_wanted and now - self.round_driver.announced_at >= OFFER_EVERY_S

    def _follow_key(self) -> None:
        """Sign with the new key after `fedcg coordinator rotate-key`."""
        identity = self.context.signing_identity()
        if self._publisher.use(identity):
            self._events.write("key_rotated", serial=identity.links[-1].serial, key=identity.key.public.hex)

    def _run_on(self, pool: ThreadPoolExecutor, work: Callable[[], object]) -> None:
        """Run work that may block on a lock, a disk or the broker; its failure ends the service."""

        def ended(future: Future[object]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                self._queue.put(Broken(error))

        pool.submit(work).add_done_callback(ended)


def _close(work: Callable[[], object]) -> None:
    """Run one step of the shutdown; disk errors are only logged."""
    try:
        work()
    except (OSError, SQLAlchemyError) as error:
        log.warning("could not store everything at the coordinator's shutdown: %s", in_words(error))
