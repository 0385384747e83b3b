"""Runs a broker in the foreground: Mosquitto, with its lists of devices kept up to date, or for demos the embedded one.

Beside a broker: applies the lists of devices that the coordinator publishes on it. Needs no access to the coordinator's directory.
"""

import hashlib
import logging
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from coordinator.broker import broker_folder
from coordinator.config import LOOPBACK_HOSTS
from coordinator.errors import BrokerError
from coordinator.paths import BROKER_NAME, CRL_NAME, Home, held
from coordinator.pki.authority import CA_NAME, credential_of, server_context, server_credential
from fedcg.find_mosquitto import Mosquitto, find_mosquitto
from fedcg.wire.errors import TransportError
from fedcg.wire.messages.topics import LISTS, LISTS_APPLIED, LISTS_READER
from fedcg.wire.transport.mqtt import MqttTransport
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles, connection_name
from fedcg.wire.transport.transport import Delivery
from fedcg.worker_process import die_with_parent

log = logging.getLogger(__name__)


@contextmanager
def following(folder: Path, reload: Callable[[], None]) -> Iterator[None]:
    """Apply every list that comes, and answer whether it was applied; the retained one comes after every reconnect.

    Args:
        folder: the broker's.
        reload: makes the broker read its lists again.

    Raises:
        BrokerError: it is no broker's folder.
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
            # the broker's copy is that of before, where this folder was brought up to date since
            is_copy = delivery.retained and isinstance(error, broker_folder.OlderListsError)
            log.log(logging.DEBUG if is_copy else logging.ERROR, "the lists of devices were not applied: %s", problem)
        answer = broker_folder.Applied(lists=hashlib.sha256(delivery.payload).hexdigest(), problem=problem)
        try:
            transport.publish(LISTS_APPLIED, answer.model_dump_json().encode())
        except TransportError as error:
            log.warning("the answer to the lists could not be sent; they come again with the link: %s", error)

    transport.subscribe(LISTS)
    transport.start(apply, lambda _up: None)
    try:
        yield
    finally:
        transport.close()


PID_NAME = "broker.pid"
EMBEDDED_PID_NAME = "embedded-broker.pid"
START_TIMEOUT_S = 15.0

Report = Callable[[str], None]


def run_mosquitto(directory: Path, report: Report) -> int:
    """Run Mosquitto until SIGTERM or SIGINT. The first line reported names it, `ready` follows once it accepts connections.

    Args:
        directory: a coordinator's, or a folder of `fedcg deploy mosquitto`.
        report: called with each line.

    Returns:
        The exit code: 0 when it was asked to end.

    Raises:
        BrokerError: there is no Mosquitto on this machine, it can't be started, or the directory is neither.
        HomeError: another one runs in this directory.
    """
    home, mosquitto = Home(directory), find_mosquitto()
    is_home = home.config_file.is_file()
    if not is_home:
        broker_folder.read_address(directory)
    if mosquitto is None:
        raise BrokerError(
            "there is no Mosquitto on this machine: install it, or run `make setup-broker`. For a demo on this machine "
            "--broker amqtt does without"
        )
    folder = home.broker if is_home else directory
    with held(folder / PID_NAME, "a broker"):
        if is_home:
            _bring_up_to_date(home)
        address = broker_folder.read_address(folder)
        broker_folder.check_dates(folder)
        report(f"broker: mosquitto ({mosquitto.binary})")
        return _supervise(folder, mosquitto, address.port, lambda: report(f"ready on {address.host}:{address.port}"))


def _bring_up_to_date(home: Home) -> None:
    # here, because it needs the database's packages, which a broker's own machine has not
    from coordinator.broker.access_lists import refresh_access
    from coordinator.storage.locks import changing_members

    with changing_members(home):
        broker_folder.write_folder(home, home.broker, refresh_access(home))


def run_embedded(home: Home, report: Report) -> int:
    """Run the embedded broker until SIGTERM or SIGINT; it supports MQTT 3.1.1 and reads no lists.

    Returns:
        0, the exit code.

    Raises:
        BrokerError: the home's broker is for other machines too, or the port is taken.
        HomeError: another one runs for this home.
    """
    broker = home.config().broker
    if broker.host not in LOOPBACK_HOSTS:
        raise BrokerError(f"amqtt is for demos on this machine, and broker.host is {broker.host}; install Mosquitto")
    try:
        from coordinator.broker.amqtt_broker import run_amqtt
    except ModuleNotFoundError as error:
        raise BrokerError("amqtt is not installed: pip install 'fedcg-edge[broker]'") from error
    with held(home.broker / EMBEDDED_PID_NAME, "a broker"):
        own = server_credential(home.pki, BROKER_NAME, broker.host)
        report("broker: amqtt")
        try:
            tls = server_context(home.pki, own, ssl.CERT_REQUIRED)
            run_amqtt(broker.port, tls, lambda: report(f"ready on {broker.host}:{broker.port}"))
        except OSError as error:
            raise BrokerError(f"amqtt can't listen on port {broker.port}: {error}") from error
    return 0


def _supervise(folder: Path, mosquitto: Mosquitto, port: int, ready: Callable[[], None]) -> int:
    config = broker_folder.write_config(folder)
    if _accepts(port):
        raise BrokerError(f"port {port} is in use on this machine; end what listens there or change broker.port")
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
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has a handler of its own


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:  # a connection without a handshake would be in the broker's log as an error
            probe.bind(("127.0.0.1", port))
        except PermissionError:
            return probe.connect_ex(("127.0.0.1", port)) == 0
        except OSError:
            return True
    return False
