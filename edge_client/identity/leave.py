"""How a device leaves for good: a signed Leave inside a session, the coordinator's confirmation, then the removal of its data."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_client.config import AgentConfig
from edge_client.errors import EnrolError, LateAnswerError, NoAnswerError, StoreFormatError
from edge_client.identity.conversation import converse
from edge_client.identity.credentials import load_keys, mqtt_config, pending
from edge_client.messaging.coordinator_link import offline_will
from edge_client.session.state import Purpose
from edge_client.store.private_store import PrivateStore, open_store
from fedcg.errors import NOT_FOUND
from fedcg.files import fsync_path
from fedcg.wire.transport.mqtt import MqttTransport


@dataclass(frozen=True)
class Departure:
    """The result of leaving.

    Attributes:
        confirmed: whether the coordinator confirmed that the device is no member any more.
        erased: the paths that were removed from this device.
        kept: what lies in the store's folder, was not made by this program, and stays.
    """

    confirmed: bool
    erased: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()


def leave(config: AgentConfig, *, erase: bool, notify: bool, timeout_s: float) -> Departure:
    """Leave the federation.

    Args:
        config: of this device.
        erase: afterwards remove the private store, keys and certificates.
        notify: send the coordinator a signed Leave; nothing is erased unless it confirms.
        timeout_s: how long to wait for it.

    Raises:
        EnrolError: the coordinator did not confirm in time, or the images lie in the store; nothing was erased.
        StoreLockedError: an agent runs with this store.
        EdgeError: keys or store can't be used.
        WireError: the TLS files can't be used.
    """
    store = open_store(config)
    if not store.is_made and not notify:
        raise StoreFormatError(
            f"{config.store} holds no private store: there is nothing to leave behind", exit_code=NOT_FOUND
        )
    if erase:
        _check_images_are_elsewhere(config)
    with TemporaryDirectory() as empty:
        used = store if store.is_made else PrivateStore(Path(empty))  # none is made only to leave
        with used.locked("lock"), used.locked("trainer.lock"):
            if notify:
                _leave_coordinator(config, used, timeout_s)
            return Departure(notify, *(_erase(config, store) if erase else ()))


def _leave_coordinator(config: AgentConfig, store: PrivateStore, timeout_s: float) -> None:
    keys = load_keys(config)
    will = offline_will(config.federation, config.device, keys.signing)
    transport = MqttTransport(mqtt_config(config, keys), will)
    try:
        converse(config, keys, store, transport, Purpose.LEAVE, timeout_s)
    except NoAnswerError as error:
        raise LateAnswerError(
            f"the coordinator did not confirm within {timeout_s:g} s ({error}). Nothing was erased. Try again, let the operator "
            f"run `fedcg device revoke {config.device}`, or use --without-coordinator"
        ) from error


def _check_images_are_elsewhere(config: AgentConfig) -> None:
    data, root = config.data.root.resolve(), config.store.resolve()
    if root in (data, *data.parents):
        raise EnrolError(f"the images in {data} lie in the private store {root}: move them first, nothing was erased")


def _erase(config: AgentConfig, store: PrivateStore) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Remove keys and certificates first, then what the program made in the private store; images and other files are not touched."""
    files = [config.keys.signing, config.keys.coordinator]
    if config.tls is not None:
        pair = (config.tls.key, config.tls.cert)
        files += [*pair, *map(pending, pair), config.tls.cert.with_name(".renewal.lock")]
        if config.tls.ca.parent == config.tls.cert.parent:  # elsewhere it is another's, such as the system's bundle
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
    with contextlib.suppress(OSError):  # a service's state directory belongs to the system; it is emptied, not removed
        store.root.rmdir()
    return (*erased, store.root), kept
