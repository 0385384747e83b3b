"""One short session with the coordinator by a program that is not the agent: to check that it answers, or to leave."""

from __future__ import annotations

import contextlib
import queue
import time
from importlib.metadata import version

from edge_client.config import AgentConfig
from edge_client.errors import NoAnswerError
from edge_client.identity.credentials import AgentKeys
from edge_client.messaging.coordinator_link import CoordinatorLink, CoordinatorTrust
from edge_client.messaging.handshake import Handshake
from edge_client.session.commands import Done, Send, SendHello
from edge_client.session.events import CoordinatorSeen, Event, HelloRefused, LinkChanged, Revoked, Tick, Welcomed
from edge_client.session.state import Purpose, SessionState
from edge_client.session.state_machine import step
from edge_client.store.cohort_secret import mark_in
from edge_client.store.private_store import PrivateStore
from edge_client.store.sent_record import SentRecord
from fedcg.sentences import REVOKED_ADVICE
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import PinnedKey
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transport.transport import Delivery, Transport

TICK_S = 0.25
QUEUE_MAX = 256
UNANSWERED = {  # by the coordinator's retained status, None where none is received
    None: "the broker delivers nothing to this device: its federation is not started (`fedcg federation start`), the coordinator has "
    "never run (`fedcg coordinator run`), or this device is missing in the broker's access list (`fedcg device show`)",
    False: "the coordinator does not run, by its last status",
    True: "the coordinator runs and does not accept this device: it was revoked or enrolled anew, or its access list is wrong",
}


def converse(
    config: AgentConfig, keys: AgentKeys, store: PrivateStore, transport: Transport, purpose: Purpose, timeout_s: float
) -> float | None:
    """Open a session, and fulfil its purpose.

    Args:
        config: of a device whose agent does not run.
        keys: its keys.
        store: its private store; nothing is saved in it, but a line of the record of what was sent.
        transport: not started yet.
        purpose: greet or leave; a device that only greets does not count as online.
        timeout_s: how long to wait.

    Returns:
        The seconds by which this box's clock is ahead of the coordinator's, by its welcome.

    Raises:
        NoAnswerError: the coordinator has not answered in time; names the step that messages reached.
    """
    trust = CoordinatorTrust(store, config.federation, keys.coordinator)
    mark, is_check = mark_in(store, config.federation), purpose is Purpose.GREET
    handshake = Handshake(config.federation, config.device, version("fedcg-edge"), mark, is_check=is_check)
    sent = SentRecord(store.root, config.federation, time.time)
    link = CoordinatorLink(config.federation, config.device, keys.signing, transport, trust, handshake, sent.message)
    items: queue.Queue[Delivery | LinkChanged] = queue.Queue(QUEUE_MAX)

    def put(item: Delivery | LinkChanged) -> None:
        with contextlib.suppress(queue.Full):  # both sides repeat messages that were not answered
            items.put_nowait(item)

    link.subscribe(chunks=False)
    transport.start(put, lambda up: put(LinkChanged(up)))
    state = SessionState(config.federation, config.device, purpose, trust.order.highest[0])
    deadline, is_online, ahead_s = time.monotonic() + timeout_s, None, None
    try:
        while not state.done and time.monotonic() < deadline:
            event = _next_event(items, link)
            if isinstance(event, HelloRefused):
                raise NoAnswerError(event.reason)
            if isinstance(event, Revoked):
                raise NoAnswerError(REVOKED_ADVICE)
            if isinstance(event, CoordinatorSeen):
                is_online = event.online
            if isinstance(event, Welcomed) and event.server_time is not None:
                ahead_s = time.time() - event.server_time
            state, commands = step(state, event, time.monotonic())
            for command in commands:
                if isinstance(command, SendHello):
                    link.hello(state.epoch)
                elif isinstance(command, Send):
                    link.send(command.message)
                else:
                    assert isinstance(command, Done)
    finally:
        transport.close()
        sent.close()
    if not state.done:
        raise NoAnswerError(getattr(transport, "last_error", None) or UNANSWERED[is_online])
    return ahead_s


def _next_event(items: queue.Queue[Delivery | LinkChanged], link: CoordinatorLink) -> Event:
    """The event of a delivery; a delivery that is refused, or of no use here, counts as a tick."""
    try:
        item = items.get(timeout=TICK_S)
        if isinstance(item, LinkChanged):
            link.end_session()
            return item
        meaning = link.open(item)
    except (queue.Empty, WireError):
        return Tick()
    return Tick() if meaning is None or isinstance(meaning, PinnedKey | Chunk) else meaning
