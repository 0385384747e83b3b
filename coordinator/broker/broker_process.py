"""Runs a broker for a coordinator's home in the foreground: Mosquitto, or for demos the embedded one."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from functools import partial

from coordinator.broker.access_lists import PID_NAME, refresh_access
from coordinator.broker.mosquitto import write_config
from coordinator.config import LOOPBACK_HOSTS
from coordinator.errors import BrokerError
from coordinator.paths import BROKER_NAME, Home, held
from coordinator.pki.authority import server_credential
from coordinator.pki.server_tls import server_context
from fedcg.find_mosquitto import Mosquitto, find_mosquitto
from fedcg.worker_process import die_with_parent

EMBEDDED_PID_NAME = "embedded-broker.pid"
START_TIMEOUT_S = 15.0

Report = Callable[[str], None]


def run_mosquitto(home: Home, report: Report) -> int:
    """Run Mosquitto until SIGTERM or SIGINT. The first line reported names it, `ready` follows once it accepts connections.

    Returns:
        The exit code: 0 when it was asked to end.

    Raises:
        BrokerError: there is none on this machine, or it can't be started.
        HomeError: another one runs for this home.
    """
    broker, mosquitto = home.config().broker, find_mosquitto()
    if mosquitto is None:
        raise BrokerError(
            "there is no Mosquitto on this machine: install it, or run `make setup-broker`. For a demo on this machine "
            "--broker amqtt does without"
        )
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # the signal may be sent as soon as the process id is known; the lists are read after that
    with held(home.broker / PID_NAME, "a broker"):
        with home.changing_members():
            refresh_access(home)
            server_credential(home.pki, BROKER_NAME, broker.host)
        report(f"broker: mosquitto ({mosquitto.binary})")
        return _supervise(home, mosquitto, broker.port, lambda: report(f"ready on {broker.host}:{broker.port}"))


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


def _supervise(home: Home, mosquitto: Mosquitto, port: int, ready: Callable[[], None]) -> int:
    config = write_config(home, home.broker)
    if _accepts(port):
        raise BrokerError(f"port {port} is in use on this machine; end what listens there or change broker.port")
    stopping: list[int] = []
    asked: list[int] = []
    signal.signal(signal.SIGHUP, lambda number, _: asked.append(number))
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
    if asked:
        child.send_signal(signal.SIGHUP)
    ready()
    code = child.wait()
    return 0 if stopping else (code or 1)


def _begin_child(parent: int) -> None:
    die_with_parent(parent, signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it has a handler of its own


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
