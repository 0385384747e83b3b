"""The coordinator at work: one task takes everything from one inbox, in order, and lets the round engine decide.

Database calls, checks of updates and disk reads run on threads; torch runs in the aggregation worker. A failure in here
ends the service: the database holds all that matters, and a restarted coordinator goes on with the same attempt.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from coordinator.aggregation.worker_messages import WorkerEvent
from coordinator.messaging.cohort_marks import Cohorts
from coordinator.messaging.event_queue import Inbox
from coordinator.messaging.flood_limits import FloodGate
from coordinator.messaging.message_checks import FromDevice, Ingest, Sessions
from coordinator.messaging.publisher import Publisher, status_will
from coordinator.rounds.pacing import LinkChanged
from coordinator.rounds.round_engine import (
    Phase,
    RoundState,
    Tick,
    UpdateStored,
)
from coordinator.service.closing import on_daemon
from coordinator.service.invitations import REMIND_S, Invitations
from coordinator.service.liveness import Attendance
from coordinator.service.member_refresh import REFRESH_S, Membership
from coordinator.service.round_driver import RoundDriver
from coordinator.service.service_context import Setup
from coordinator.service.threads import Threads
from coordinator.updates.https_artifacts import Shelf
from coordinator.updates.published_artifacts import Library
from coordinator.updates.receipts import Checked, Uplink
from coordinator.updates.receiver import Broken
from coordinator.updates.upload_windows import Grant
from fedcg.refusal_counter import Refusals
from fedcg.wire import versions
from fedcg.wire.errors import CapacityError, IntegrityError, VersionError
from fedcg.wire.messages.messages import Accept, Decline, DeviceStatus, Heartbeat, Hello, Leave, Manifest, Need
from fedcg.wire.messages.topics import TopicKind, Topics
from fedcg.wire.transport.transport import Delivery

TICK_S = 0.25
STRANGER_REFRESH_S = 1.0
OFFER_EVERY_S = 30.0
"""A broker may lose an offer, or the end, although it is retained: as many bytes a day as heartbeats have."""
LEAVE_AFTER_S = 5.0
LEAVE_AT_LATEST_S = 60.0
CLOSE_TIMEOUT_S = 2.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Stop:
    pass


_Item = Delivery | WorkerEvent | Checked | Grant | Broken | LinkChanged | _Stop


class Service:
    """Serves one federation. Make it with `start_service`."""

    def __init__(self, setup: Setup, epoch: int) -> None:
        topics = Topics(setup.federation.id)
        self.epoch = epoch
        self.finished_and_left = asyncio.Event()
        self._setup = setup
        self._events = setup.events
        self._inbox: Inbox[_Item] = Inbox(asyncio.get_running_loop())
        self._sessions = Sessions()
        self._cohorts = Cohorts()
        self._refusals = Refusals(setup.events)
        self._ingest = Ingest(topics, self._sessions, self._refusals)
        signing_identity = setup.signing_identity()
        self._transport = setup.connect(status_will(topics, epoch, signing_identity.key))
        self._publisher = Publisher(
            self._transport, topics, signing_identity, epoch, self._sessions, self._cohorts, setup.limits
        )
        self._library = Library(setup.artifacts, self._publisher.chunk_bytes)
        self._worker = setup.make_worker(setup.worker, self._inbox.put)
        self._round_driver = RoundDriver(setup, self._publisher, self._library, self._worker)
        self._uplink = Uplink(
            setup,
            self._publisher,
            lambda: self._round_driver.state,
            lambda: self._round_driver.base,
            self._inbox.put,
            self._refusals,
        )
        self._round_driver.use_uplink(self._uplink)
        self._invitations = Invitations(setup, self._round_driver, self._publisher, self._uplink)
        self._members = Membership(
            setup, self._ingest, self._uplink, self._round_driver, self._publisher, self._cohorts
        )
        self._floods = FloodGate()
        self._topics = topics
        self._attendance = Attendance(self._round_driver, self._uplink.intake, setup.events)
        self._turned_away: set[str] = set()
        self._readers = Threads(1, "artifacts")
        self._tasks: set[asyncio.Task[Any]] = set()
        self._finished_at: float | None = None

    @property
    def state(self) -> RoundState:
        """Where the federation stands."""
        return self._round_driver.state

    @property
    def shelf(self) -> Shelf:
        """What the HTTPS carrier serves from and takes into."""
        return Shelf(self._library, self._uplink.intake, self._setup.store, self._events)

    @property
    def is_connected(self) -> bool:
        """Whether the link to the broker stands."""
        return self.state.pace.down_since is None

    @property
    def worker_pid(self) -> int | None:
        """The process of the aggregation worker, once it is ready."""
        return self._round_driver.worker_pid

    @property
    def refusals(self) -> dict[str, int]:
        """Messages refused since the start, by reason, and messages dropped because too many came."""
        return {**self._refusals.counts, "dropped": self._inbox.dropped + self._uplink.intake.dropped}

    def refused_of(self, device: str) -> int:
        """Messages of a device refused since the start."""
        return self._refusals.of(device)

    def is_silenced(self, device: str) -> bool:
        """Whether a device sent so much that it is off the broker's access list for a while."""
        return self._floods.is_silenced(device)

    async def start(self) -> None:
        """Start the worker, rebuild the state, connect."""
        self._worker.start()
        await self._members.refresh()
        await self._round_driver.restart()
        await self._members.drop_strangers()
        for topic in (self._topics.all_up_control(), self._topics.all_up_chunk(), self._topics.all_status()):
            self._transport.subscribe(topic)
        self._uplink.intake.start()
        self._publisher.start()
        self._transport.start(self._on_delivery, lambda up: self._inbox.put(LinkChanged(up)))
        self._events.write("started", epoch=self.epoch)

    async def run(self) -> None:
        """Work until `stop` is called. Whatever it raises must end the process: a restart goes on from the database."""
        ticked_at = time.monotonic()
        while True:
            item = await self._inbox.get(TICK_S)
            if isinstance(item, _Stop):
                return
            if item is not None:
                await self._handle(item)
            if time.monotonic() - ticked_at >= TICK_S:
                ticked_at = time.monotonic()
                await self._tick()

    def stop(self) -> None:
        """Make `run` return."""
        self._inbox.put(_Stop())

    async def close(self) -> None:
        """Say goodbye and end worker and transport; call it after `run` returned."""
        for task in self._tasks:
            task.cancel()
        self._publisher.status(online=False)
        closing = [
            on_daemon(work)
            for work in (self._publisher.close, self._uplink.stop, self._transport.close, self._worker.stop)
        ]
        await asyncio.wait(closing, timeout=CLOSE_TIMEOUT_S)
        self._events.write("stopped", epoch=self.epoch)

    def _on_delivery(self, delivery: Delivery) -> None:
        """On the transport's thread: count and enqueue, nothing else."""
        device, kind = self._ingest.origin(delivery)
        is_chunk = kind is TopicKind.UP_CHUNK
        if is_chunk and self._uplink.intake.frame(device, delivery.payload):
            return
        if not self._floods.admits(device, kind):
            self._refusals.note(delivery.topic, CapacityError("more messages than a device may send"), device)
        elif not is_chunk:
            self._inbox.put(delivery, max(1, len(delivery.payload)), device)

    async def _handle(self, item: _Item) -> None:
        if isinstance(item, Delivery):
            await self._delivered(item)
        elif isinstance(item, LinkChanged):
            await self._link_changed(item)
        elif isinstance(item, Checked):
            await self._checked(item)
        elif isinstance(item, Grant):
            self._uplink.follow(item)
        elif isinstance(item, Broken):
            raise item.error
        elif not isinstance(item, _Stop):
            await self._round_driver.follow_worker(item)

    async def _delivered(self, delivery: Delivery) -> None:
        device, _ = self._ingest.origin(delivery)
        if self._floods.is_silenced(device):
            return
        if not device and self._members.is_older_than(STRANGER_REFRESH_S):
            await self._members.refresh()  # enrolled since the start, perhaps
        incoming = self._ingest.open(delivery)
        if incoming is not None:
            await self._message(incoming)

    async def _message(self, incoming: FromDevice) -> None:
        device, message = incoming.device, incoming.message
        self._attendance.presence.heard(device, time.monotonic())
        if isinstance(message, DeviceStatus):
            if not message.online:
                await self._attendance.went(device, "it said goodbye, or its will did")
        elif isinstance(message, Hello):
            await self._hello(device, message)
        elif isinstance(message, Leave):
            if await self._members.leaves(device):
                self._spawn(self._members.shut_out())
        else:
            if not self._attendance.is_online(device):
                await self._attendance.came(device)
            await self._in_session(device, message)

    async def _in_session(self, device: str, message: Heartbeat | Accept | Decline | Manifest | Need) -> None:
        if isinstance(message, Accept | Decline):
            await self._invitations.answered(device, message)
        elif isinstance(message, Manifest):
            ended = await self._uplink.manifest(device, message)
            if ended is not None:
                await self._round_driver.apply(ended)
        elif isinstance(message, Need) and self._library.allows(message.artifact):
            source = self._library.known(message.artifact)
            if source is None:
                self._spawn(self._serve(device, message))
            else:
                self._publisher.chunks(device, source, message.ranges)

    async def _hello(self, device: str, hello: Hello) -> None:
        version = versions.agree(hello.versions)
        if version is None:
            self._turn_away(device, hello)
            return
        nonce = self._sessions.greet(device, hello.nonce, hello.carrier)
        self._invitations.forget(device)
        now = self._setup.clock()
        await asyncio.to_thread(self._setup.store.saw_device, device, hello.agent, now)
        unlike = self._cohorts.hear(device, hello.cohort)
        if unlike and self._events.write("cohort_differs", client=device, unlike=",".join(unlike)):
            log.warning(
                "%s: its cohort secret is not that of %s: private networks start apart", device, ", ".join(unlike)
            )
        self._publisher.welcome(device, hello.nonce, nonce, now, version)
        self._attendance.presence.expect(device, hello.heartbeat_s, time.monotonic())
        await self._attendance.came(device)

    def _turn_away(self, device: str, hello: Hello) -> None:
        reason = versions.explain_versions(hello.versions, versions.SPOKEN)
        self._refusals.note(f"the hello of {device}", VersionError(reason), device)
        if device not in self._turned_away:
            self._turned_away.add(device)
            log.warning("%s (agent %s): %s", device, hello.agent, reason)
        self._publisher.turn_away(device, hello)

    async def _checked(self, checked: Checked) -> None:
        ended = await self._uplink.ended(checked)
        if isinstance(ended, UpdateStored):
            self._worker.add(ended.client, checked.received.manifest.artifact.id)
        if ended is not None:
            await self._round_driver.apply(ended)

    async def _serve(self, device: str, need: Need) -> None:
        try:
            source = await self._readers.run(self._library.source, need.artifact)
        except (IntegrityError, OSError):
            log.exception("%s asked for artifact %s, which can't be read", device, need.artifact)
            return
        self._publisher.chunks(device, source, need.ranges)

    async def _link_changed(self, change: LinkChanged) -> None:
        self._events.write("link", up=change.up)
        if not change.up:
            await self._round_driver.apply(change)
            return
        self._attendance.presence.pardon(time.monotonic())
        self._library.change_chunk_bytes(self._publisher.chunk_bytes)
        self._publisher.keys()
        self._publisher.status(online=True)
        await self._round_driver.apply(change)
        await self._round_driver.announce()
        self._invitations.remind()

    async def _tick(self) -> None:
        self._uplink.intake.tick()
        await self._round_driver.apply(Tick())
        now = time.monotonic()
        if self.is_connected and (not self._round_driver.is_announced or self._is_offer_due(now)):
            await self._round_driver.announce()  # the queue was full, or somebody may not have heard
        if self._members.is_older_than(REFRESH_S):
            await self._members.refresh()
            await self._follow_key()
        if changed := await self._members.follow_floods(self._floods.silenced()):
            self._spawn(self._members.silence(changed))
        if self.is_connected:
            await self._attendance.miss_silent(now)
        self._invitations.remind(REMIND_S)
        if self.state.phase is not Phase.FINISHED:
            return
        self._finished_at = self._finished_at or now
        since = now - self._finished_at
        if since >= LEAVE_AT_LATEST_S or (since >= LEAVE_AFTER_S and not self.state.online):
            self.finished_and_left.set()

    def _is_offer_due(self, now: float) -> bool:
        is_over = self.state.phase is Phase.FINISHED and bool(self.state.online)
        is_wanted = is_over or (self.state.phase is Phase.COLLECTING and bool(self._invitations.unanswered))
        return is_wanted and now - self._round_driver.announced_at >= OFFER_EVERY_S

    async def _follow_key(self) -> None:
        """Sign with the new key after `fedcg coordinator rotate-key`."""
        signing_identity = await asyncio.to_thread(self._setup.signing_identity)
        if self._publisher.use(signing_identity):
            self._events.write(
                "key_rotated", serial=signing_identity.links[-1].serial, key=signing_identity.key.public.hex
            )

    def _spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._inbox.put(Broken(error))


async def start_service(setup: Setup) -> Service:
    """Take the lease and start to serve; `run` must follow."""
    epoch = await asyncio.to_thread(setup.store.next_epoch)
    service = Service(setup, epoch)
    await service.start()
    return service
