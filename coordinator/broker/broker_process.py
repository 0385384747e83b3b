"""Runs Mosquitto in the foreground.

Applies the lists of devices that the coordinator publishes to Mosquitto. Needs no access to the coordinator's directory.
"""

import hashlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coordinator.broker import broker_folder
from coordinator.errors import BrokerError
from coordinator.paths import CRL_NAME, Home, held
from coordinator.pki.authority import CA_NAME, credential_of
from fedcg.find_mosquitto import NO_MOSQUITTO, Mosquitto, find_mosquitto
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import LISTS, LISTS_APPLIED, LISTS_READER
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name
from fedcg.wire.transport.transport import Delivery
from fedcg.worker_process import die_with_parent

log = logging.getLogger(__name__)


@contextmanager
def following(folder: Path, reload: Callable[[], None]) -> Iterator[None]:
    """Apply every received list, and respond whether it was applied. The retained list arrives after every reconnect.

    Args:
        folder: the broker's folder.
        reload: makes the broker reload its lists.

    Raises:
        BrokerError: it is not a broker's folder.
        TransportError: its certificates can't be used.
    """
    address = broker_folder.read_address(folder)
    authority = credential_of(folder, CA_NAME).certificate
    own = credential_of(folder, LISTS_READER)
    tls = TlsFiles(authority, own.certificate, own.key)
    connection = connection_name(LISTS, own.key.read_bytes())  # no device can take its client id and end its session
    transport = MqttTransport(MqttConfig(address.host, address.port, LISTS_READER, tls=tls, connection=connection))

    def apply(delivery: Delivery) -> None:
        problem = ""
        try:
            lists = broker_folder.parse_lists(
                delivery.payload, authority.read_bytes(), (folder / CRL_NAME).read_bytes()
            )
            broker_folder.write_lists(folder, lists)
            reload()
        except (BrokerError, OSError, ValueError) as error:
            problem = str(error)[:500]
            # the broker's retained copy is older if this folder was updated since
            is_copy = delivery.retained and isinstance(error, broker_folder.OlderListsError)
            log.log(logging.DEBUG if is_copy else logging.ERROR, "the lists of devices were not applied: %s", problem)
        answer = broker_folder.Applied(lists=hashlib.sha256(delivery.payload).hexdigest(), problem=problem)
        try:
            transport.publish(LISTS_APPLIED, answer.model_dump_json().encode())
        except TransportError as error:
            log.warning("could not confirm the lists; they arrive again after a reconnect: %s", error)

    transport.subscribe(LISTS)
    transport.start(apply, lambda _up: None)
    try:
        yield
    finally:
        transport.close()


PID_NAME = "broker.pid"
START_TIMEOUT_S = 15.0

Report = Callable[[str], None]


def run_mosquitto(directory: Path, report: Report) -> int:
    """Run Mosquitto until SIGTERM or SIGINT. The first reported line names it; `ready` follows once it accepts connections.

    Args:
        directory: a coordinator's directory, or a folder from `fedcg deploy mosquitto`.
        report: called with each line.

    Returns:
        The exit code: 0 if it was asked to stop.

    Raises:
        BrokerError: Mosquitto is not installed or can't be started, or the directory is neither.
        HomeError: another broker runs in this directory.
    """
    home, mosquitto = Home(directory), find_mosquitto()
    is_home = home.config_file.is_file()
    if not is_home:
        broker_folder.read_address(directory)
    if mosquitto is None:
        raise BrokerError(NO_MOSQUITTO)
    folder = home.broker if is_home else directory
    with held(folder / PID_NAME, "a broker"):
        if is_home:
            _bring_up_to_date(home)
        address = broker_folder.read_address(folder)
        broker_folder.check_dates(folder)
        report(f"broker: mosquitto ({mosquitto.binary})")
        return _supervise(folder, mosquitto, address.port, lambda: report(f"ready on {address.host}:{address.port}"))


def _bring_up_to_date(home: Home) -> None:
    # imported here: it needs the database's packages, which are not installed on a broker's machine
    from coordinator.broker.access_lists import refresh_access
    from coordinator.storage.locks import changing_members

    with changing_members(home):
        broker_folder.write_folder(home, home.broker, refresh_access(home))


def _supervise(folder: Path, mosquitto: Mosquitto, port: int, ready: Callable[[], None]) -> int:
    config = broker_folder.write_config(folder)
    if _accepts(port):
        raise BrokerError(f"port {port} is in use on this machine; stop the program that uses it or change broker.port")
    stopping: list[int] = []
    child = subprocess.Popen(
        [str(mosquitto.binary), "-c", str(config)],
        env=mosquitto.environment(),
        preexec_fn=partial(_begin_child, os.getpid()),
    )

    def end(number: int, _frame: object) -> None:
        stopping.append(number)
        child.terminate()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _accepts(port):
        if child.poll() is not None or time.monotonic() > deadline:
            child.kill()
            raise BrokerError(f"mosquitto did not start (exit code {child.wait()}); its messages are above")
        time.sleep(0.005)
    signal.signal(signal.SIGHUP, lambda *_: child.send_signal(signal.SIGHUP))
    with following(folder, lambda: child.send_signal(signal.SIGHUP)):
        ready()
        code = child.wait()
    return 0 if stopping else (code or 1)


def _begin_child(parent: int) -> None:
    die_with_parent(parent, signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until Mosquitto installs its own handler


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # the broker would log a connection without a handshake as an error
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return probe.connect_ex(("127.0.0.1", port)) == 0
        except OSError:
            return True
    return False
