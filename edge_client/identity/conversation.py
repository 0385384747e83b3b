"""A short session with the coordinator without the agent: to check that it answers, or to leave permanently.

To leave, the device sends a signed Leave, waits for the coordinator's confirmation, then erases its data.
"""

import contextlib
import queue
import shutil
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError, LateAnswerError, NoAnswerError, StoreFormatError
from edge_client.identity.credentials import AgentKeys, load_keys, mqtt_config, pending
from edge_client.link.coordinator_link import CoordinatorLink, CoordinatorTrust, Handshake, offline_will
from edge_client.session import signals
from edge_client.store.checked_files import SentRecord
from edge_client.store.cohort_secret import mark_in
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.errors import NOT_FOUND
from fedcg.files import fsync_path
from fedcg.sentences import REVOKED_ADVICE
from fedcg.values import Value
from fedcg.wire.errors import WireError
from fedcg.wire.messages.envelopes import PinnedKey
from fedcg.wire.messages.schemas import COORDINATOR, Leave
from fedcg.wire.transfer.chunks import Chunk
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.transport import Delivery, Transport

TICK_S = 0.25
REPEAT_S = 2.0  # until a hello or a Leave without an answer is sent again
QUEUE_MAX = 256
UNANSWERED = {  # by the coordinator's retained status; None if not received
    None: "the broker delivers nothing to this device: its federation is not started (`fedcg federation start`), the coordinator has "
    "never run (`fedcg coordinator run`), or this device is missing in the broker's access list (`fedcg device show`)",
    False: "the coordinator is not running, according to its last status",
    True: "the coordinator is running but does not accept this device: it was revoked or enrolled again, or its access list is wrong",
}


def converse(
    config: AgentConfig, keys: AgentKeys, store: PrivateStore, transport: Transport, wait_s: float, *, is_leaving: bool
) -> float | None:
    """Open a session, which tests messages in both directions. Then leave the federation if `is_leaving` is set.

    Args:
        config: of a device whose agent does not run.
        keys: its keys.
        store: its private store. Only a line in the record of sent messages is saved.
        transport: not started yet.
        wait_s: how long to wait.
        is_leaving: leave the federation; otherwise only say hello, which does not count as online.

    Returns:
        How many seconds this device's clock is ahead of the coordinator's, from its welcome; None if unknown.

    Raises:
        NoAnswerError: the coordinator has not answered in time; names the last step that worked.
    """
    trust = CoordinatorTrust(store, config.federation, keys.coordinator)
    mark = mark_in(store, config.federation)
    handshake = Handshake(config.federation, config.device, version("fedcg-edge"), mark, is_check=not is_leaving)
    sent = SentRecord(store.root, config.federation, time.time)
    link = CoordinatorLink(config.federation, config.device, keys.signing, transport, trust, handshake, sent.message)
    items: queue.Queue[Delivery | signals.LinkChanged] = queue.Queue(QUEUE_MAX)

    def put(item: Delivery | signals.LinkChanged) -> None:
        with contextlib.suppress(queue.Full):  # both sides repeat unanswered messages
            items.put_nowait(item)

    link.subscribe(chunks=False)
    transport.start(put, lambda up: put(signals.LinkChanged(up)))
    deadline = due = time.monotonic() + wait_s
    epoch, is_up, is_online, ahead_s = 0, False, None, None
    try:
        while (now := time.monotonic()) < deadline:
            event = _next_event(items, link)
            if isinstance(event, signals.LinkChanged):
                is_up, due = event.up, now
            elif isinstance(event, signals.CoordinatorSeen):
                is_online = event.online
                if event.online and event.epoch > epoch and link.handshake.is_open:  # of an earlier coordinator
                    link.handshake.close()
                    due = now
            elif isinstance(event, signals.Welcomed):
                epoch, due = event.epoch, now
                ahead_s = None if event.server_time is None else time.time() - event.server_time
            if isinstance(event, signals.Left if is_leaving else signals.Welcomed):
                return ahead_s
            if is_up and now >= due:
                due = now + REPEAT_S
                if link.handshake.is_open:
                    link.send(
                        Leave(federation=config.federation, sender=config.device, recipient=COORDINATOR, epoch=epoch)
                    )
                else:
                    link.hello(trust.order.highest[0])
    finally:
        transport.close()
        sent.close()
    raise NoAnswerError(getattr(transport, "last_error", None) or link.why_refused or UNANSWERED[is_online])


def _next_event(items: queue.Queue[Delivery | signals.LinkChanged], link: CoordinatorLink) -> signals.Input:
    """The event of a delivery. Refused or irrelevant deliveries count as a tick.

    Raises:
        NoAnswerError: the coordinator does not accept this device.
    """
    try:
        item = items.get(timeout=TICK_S)
        if isinstance(item, signals.LinkChanged):
            link.handshake.close()
            return item
        meaning = link.open(item)
    except (queue.Empty, WireError):
        return signals.Tick()
    if isinstance(meaning, signals.HelloRefused | signals.Revoked):
        raise NoAnswerError(REVOKED_ADVICE if isinstance(meaning, signals.Revoked) else meaning.reason)
    return signals.Tick() if meaning is None or isinstance(meaning, PinnedKey | Chunk) else meaning


class Departure(Value):
    """The result of leaving.

    Attributes:
        confirmed: whether the coordinator confirmed that the device is no longer a member.
        erased: paths that were erased.
        kept: paths in the store's folder that were not created by this program, and remain.
        aside: private stores that were moved aside, e.g. as `store.before`, and remain.
    """

    confirmed: bool
    erased: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()
    aside: tuple[Path, ...] = ()


def leave(config: AgentConfig, *, erase: bool, notify: bool, timeout_s: float) -> Departure:
    """Leave the federation.

    Args:
        config: of this device.
        erase: afterwards erase the private store, keys and certificates.
        notify: send the coordinator a signed Leave. Nothing is erased unless it confirms.
        timeout_s: how long to wait for the confirmation.

    Raises:
        EnrolError: the coordinator did not confirm in time, or the images are in the store; nothing was erased.
        StoreLockedError: an agent runs with this store.
        EdgeError: keys or store can't be used.
        WireError: the TLS files can't be used.
    """
    store = open_store(config)
    if not store.is_made and not notify:
        raise StoreFormatError(f"{config.store} contains no private store: nothing to leave", exit_code=NOT_FOUND)
    if erase:
        _check_images_are_elsewhere(config)
    with TemporaryDirectory() as empty:
        used = store if store.is_made else PrivateStore(Path(empty))  # don't create a store just to leave
        with used.alone():
            if notify:
                _leave_coordinator(config, used, timeout_s)
            return Departure(notify, *((*_erase(config, store), _moved_aside(config.store)) if erase else ()))


def _moved_aside(store: Path) -> tuple[Path, ...]:
    beside = (path for path in store.parent.glob("*") if path.name.startswith(f"{store.name}."))
    return tuple(sorted(path for path in beside if PrivateStore(path).is_made))


def _leave_coordinator(config: AgentConfig, store: PrivateStore, timeout_s: float) -> None:
    keys = load_keys(config)
    will = offline_will(config.federation, config.device, keys.signing)
    transport = MqttTransport(mqtt_config(config, keys), will)
    try:
        converse(config, keys, store, transport, timeout_s, is_leaving=True)
    except NoAnswerError as error:
        raise LateAnswerError(
            f"the coordinator did not confirm within {timeout_s:g} s ({error}). Nothing was erased. Try again, ask the operator "
            f"to run `fedcg device revoke {config.device}`, or use --without-coordinator"
        ) from error


def _check_images_are_elsewhere(config: AgentConfig) -> None:
    data, root = config.data.root.resolve(), config.store.resolve()
    if root in (data, *data.parents):
        raise EnrolError(f"the images in {data} are in the private store {root}: move them first. Nothing was erased")


def _erase(config: AgentConfig, store: PrivateStore) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Erase keys and certificates first, then the program's files in the private store. Images and other files are not touched."""
    files = [config.keys.signing, config.keys.coordinator]
    if config.tls is not None:
        pair = (config.tls.key, config.tls.cert)
        files += [*pair, *map(pending, pair), config.tls.cert.with_name(".renewal.lock")]
        if config.tls.ca.parent == config.tls.cert.parent:  # otherwise shared, e.g. the system's bundle
            files.append(config.tls.ca)
    erased = [path for path in files if path.exists()]
    for path in erased:
        path.unlink()
        fsync_path(path.parent)
    if not store.is_made:
        return tuple(erased), ()
    for path in store.own():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    kept = tuple(sorted(store.root.iterdir()))
    with contextlib.suppress(OSError):  # a service's state directory belongs to the system and is only emptied
        store.root.rmdir()
    return (*erased, store.root), kept
