"""Runs a broker for a coordinator's home in the foreground: Mosquitto when there is one, else amqtt in this process."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from enum import Enum
from pathlib import Path

from coordinator.broker.deployed_mosquitto import PID_FILE, refresh_lists
from coordinator.broker.mosquitto import ACL_NAME, write_access_list, write_config
from coordinator.config import LOOPBACK_HOSTS
from coordinator.errors import BrokerError
from coordinator.paths import BROKER_NAME, Home, held
from coordinator.pki.authority import CA_NAME, credential_of, observers_of, server_credential, write_revocations
from coordinator.rounds.records import CertificateRecord
from coordinator.storage.store import Store
from fedcg.files import replace_durably
from fedcg.find_mosquitto import Mosquitto, find_extracted, find_installed
from fedcg.wire.messages.messages import COORDINATOR
from fedcg.wire.messages.topics import Topics

RELOAD_BY_HAND = (
    "No broker of this coordinator runs on this machine. If yours is on another one: copy `acl` and `crl.pem` of the folder of "
    "`fedcg deploy mosquitto` there after every change of devices, and send it SIGHUP."
)
BROKER_COMMAND = "mosquitto"
PID_NAME = "broker.pid"
SILENCED_NAME = "silenced.json"
START_TIMEOUT_S = 15.0
PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)

Say = Callable[[str], None]


class BrokerKind(str, Enum):
    """Which broker to run; `auto` takes the first that there is, in this order."""

    AUTO = "auto"
    MOSQUITTO = "mosquitto"
    EXTRACTED = "extracted"
    AMQTT = "amqtt"


@dataclass(frozen=True)
class Choice:
    """A broker that can be started; `mosquitto` is None for amqtt."""

    kind: BrokerKind
    mosquitto: Mosquitto | None

    @property
    def title(self) -> str:
        """What is told to people."""
        return self.kind.value if self.mosquitto is None else f"{self.kind.value} ({self.mosquitto.binary})"


def choose(kind: BrokerKind) -> Choice:
    """Find the broker that is asked for.

    Raises:
        BrokerError: it is not on this machine; says how to get one.
    """
    if kind in (BrokerKind.AUTO, BrokerKind.MOSQUITTO) and (installed := find_installed()) is not None:
        return Choice(BrokerKind.MOSQUITTO, installed)
    if kind in (BrokerKind.AUTO, BrokerKind.EXTRACTED) and (extracted := find_extracted()) is not None:
        return Choice(BrokerKind.EXTRACTED, extracted)
    if kind in (BrokerKind.AUTO, BrokerKind.AMQTT):
        return Choice(BrokerKind.AMQTT, None)
    raise BrokerError(f"no {kind.value} broker here; run `make setup-broker`, install mosquitto, or use --broker amqtt")


def run_broker(home: Home, kind: BrokerKind, say: Say) -> int:
    """Run a broker until SIGTERM or SIGINT. The first line said names it, `ready` follows once it accepts connections.

    Returns:
        The exit code: 0 when it was asked to end.

    Raises:
        BrokerError: it can't be started.
        HomeError: another one runs for this home.
    """
    broker = home.config().broker
    choice = choose(kind)
    signal.signal(signal.SIGHUP, lambda *_: None)  # from here on others may ask for the lists to be read, which follows
    with held(home.broker / PID_NAME, "a broker"):
        with home.changing_members():
            refresh_access(home)
            server_credential(home.pki, BROKER_NAME, broker.host)
        say(f"broker: {choice.title}")
        ready = f"ready on {broker.host}:{broker.port}"
        if choice.mosquitto is None:
            return _run_amqtt(home, broker.host, broker.port, lambda: say(ready))
        return _run_mosquitto(home, choice.mosquitto, broker.port, lambda: say(ready))


def refresh_access(home: Home) -> None:
    """Write revocation list and access list from the database, in this order: who is out must not come back."""
    federations, devices, revoked = _access(home)
    serials = [
        (int(record.serial, 16), datetime.fromtimestamp(record.revoked_at or 0.0, timezone.utc)) for record in revoked
    ]
    write_revocations(home.pki, serials)
    write_access_list(home, home.broker / ACL_NAME, federations, devices)


def silence(home: Home, devices: Collection[str]) -> bool:
    """Leave exactly these devices out of every access list from now on; `publish_access` tells the result."""
    with home.changing_members():
        replace_durably(home.broker / SILENCED_NAME, json.dumps(sorted(devices)))
        return publish_access(home)


def _access(home: Home) -> tuple[list[str], list[str], list[CertificateRecord]]:
    """Federations, devices that may connect, and revoked certificates, as the database says now."""
    silenced = silenced_in(home)
    store = Store(home.database)
    try:
        federations = [record.id for record in store.federations()]
        devices = [device.id for device in store.members() if device.id not in silenced]
        return federations, devices, store.register.revoked_certificates(time.time())
    finally:
        store.close()


def silenced_in(home: Home) -> list[str]:
    """Who is left out; a file that can't be read names nobody: whoever goes on is silenced again."""
    try:
        return list(json.loads((home.broker / SILENCED_NAME).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError):
        return []


def publish_access(home: Home) -> bool:
    """`refresh_access`, and make every broker on this machine that reads the lists read them again.

    Returns:
        False when none was reached.
    """
    refresh_access(home)
    refresh_lists(home)
    return reload_brokers(home)


def reload_brokers(home: Home) -> bool:
    """Make the home's brokers on this machine read their lists again; False when none was reached."""
    reloaded = [_reload(broker) for broker in running_brokers(home)]
    return any(reloaded)


def running_brokers(home: Home) -> list[int]:
    """Process ids of the home's brokers on this machine: the one of `fedcg broker run`, and the operator's own Mosquitto.

    A file with a process id outlives its process, and the id is given to others: so it is looked at what has it now.
    """
    own = home.broker / PID_NAME
    return _process_of(own, lambda pid: _has_open(pid, own)) + _process_of(home.broker / PID_FILE, _is_mosquitto)


def _reload(broker: int) -> bool:
    try:
        os.kill(broker, signal.SIGHUP)
    except OSError as error:
        log.warning("the broker, process %d, was not made to read its lists again: %s", broker, error)
        return False
    return True


def _process_of(pid_file: Path, is_broker: Callable[[int], bool]) -> list[int]:
    try:
        pid = int(pid_file.read_text(encoding="ascii"))
        return [pid] if is_broker(pid) else []
    except (OSError, ValueError):
        return []


def _has_open(pid: int, path: Path) -> bool:
    """Whether a process has a file open, as a broker has the one that it holds locked."""
    for opened in Path(f"/proc/{pid}/fd").glob("*"):
        with suppress(OSError):  # closed meanwhile
            if opened.samefile(path):
                return True
    return False


def _is_mosquitto(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() == BROKER_COMMAND


class Members:
    """Rules for amqtt: who is enrolled, with which certificates, and what topics allow; `reload` after a change."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self.reload()

    def reload(self) -> None:
        """Read federations, devices, observers and revoked certificates again."""
        federations, devices, revoked = _access(self._home)
        self._topics = [Topics(federation) for federation in federations]
        self._identities = frozenset({COORDINATOR, *devices, *observers_of(self._home)})
        self._revoked = frozenset(int(record.serial, 16) for record in revoked)

    def admits(self, identity: str, serial: int) -> bool:
        """Whether an identity may connect with the certificate of this serial number."""
        return identity in self._identities and serial not in self._revoked

    def allows(self, identity: str, action: str, topic: str) -> bool:
        """Whether an identity may do "publish", "subscribe" or "receive" on a topic."""
        if identity not in self._identities:
            return False
        if action == "publish":
            return any(topics.may_publish(identity, topic) for topics in self._topics)
        return any(topics.may_read(identity, topic) for topics in self._topics)


def _run_amqtt(home: Home, host: str, port: int, ready: Callable[[], None]) -> int:
    if host not in LOOPBACK_HOSTS:
        raise BrokerError(f"amqtt serves this machine only, and broker.host is {host}; install mosquitto")
    try:
        from coordinator.broker.amqtt_broker import run_amqtt
    except ModuleNotFoundError as error:
        raise BrokerError("no Mosquitto here and amqtt is not installed: pip install 'fedcg-edge[broker]'") from error
    members = Members(home)
    signal.signal(signal.SIGHUP, lambda *_: members.reload())
    members.reload()
    server = credential_of(home.pki, BROKER_NAME)
    ca = credential_of(home.pki, CA_NAME).certificate
    try:
        run_amqtt(port, ca, server.certificate, server.key, members.allows, ready, admits=members.admits)
    except OSError as error:
        raise BrokerError(f"amqtt can't listen on port {port}: {error}") from error
    return 0


def _run_mosquitto(home: Home, mosquitto: Mosquitto, port: int, ready: Callable[[], None]) -> int:
    config = write_config(home, home.broker)
    if _accepts(port):
        raise BrokerError(f"port {port} is in use on this machine; end what listens there or change broker.port")
    stopping: list[int] = []
    asked: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: asked.append(number))
    child = subprocess.Popen(
        [str(mosquitto.binary), "-c", str(config)],
        env=mosquitto.environment(),
        preexec_fn=_die_with_parent if sys.platform == "linux" else None,
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
    if asked:
        child.send_signal(signal.SIGHUP)
    ready()
    code = child.wait()
    return 0 if stopping else (code or 1)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has a handler of its own


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
