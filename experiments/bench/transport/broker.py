"""The stage of the transport benches: a Mosquitto with the configuration that we generate, mutual TLS, and processes with a pipe."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coordinator.broker.broker_folder import write_folder
from coordinator.broker.lists import Lists
from coordinator.broker.mosquitto import write_config
from coordinator.cli.opening import create_home
from coordinator.config import BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.pki.authority import CA_NAME, credential_of, issue
from experiments.bench.transport.peers import Party
from experiments.demo.run_folder import LOOPBACK, free_ports
from fedcg.child_python import spawning
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.messages.messages import COORDINATOR
from fedcg.wire.messages.signing import SigningKey
from fedcg.wire.transfer.broker_presets import LinkLimits
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles

FEDERATION = "bench"
SECONDS_MAX = 300.0
START_S = 20.0


def device_name(number: int) -> str:
    """The id of a bench device."""
    return f"device-{number:04}"


class Bench:
    """A broker and a folder for one run."""

    def __init__(self, home: Home, root: Path, devices: Sequence[str]) -> None:
        self.home = home
        self.root = root
        self.devices = tuple(devices)
        for name in devices:
            issue(home.pki, name)
            SigningKey.generate().save(root / f"{name}.key")

    def public(self, name: str) -> str:
        """The public key of a device."""
        return SigningKey.load(self.root / f"{name}.key").public.hex

    def mqtt(self, identity: str, limits: LinkLimits) -> MqttConfig:
        """How an identity reaches the broker."""
        own = credential_of(self.home.pki, identity)
        tls = TlsFiles(credential_of(self.home.pki, CA_NAME).certificate, own.certificate, own.key)
        broker = self.home.config().broker
        return MqttConfig(broker.host, broker.port, identity, tls=tls, protocol="5", in_flight=limits.in_flight)

    def party(self, identity: str, limits: LinkLimits) -> Party:
        """A bench process of an identity."""
        key = self.home.signing_key if identity == COORDINATOR else self.root / f"{identity}.key"
        return Party(self.mqtt(identity, limits), FEDERATION, key, self.root / f"of-{identity}", limits)

    @property
    def coordinator_key(self) -> str:
        """The coordinator's public key."""
        return SigningKey.load(self.home.signing_key).public.hex


@contextmanager
def bench(devices: Sequence[str]) -> Iterator[Bench]:
    """A bench with a running Mosquitto.

    Raises:
        BrokerError: there is none on this machine, or it does not start.
    """
    mosquitto = find_mosquitto()
    if mosquitto is None:
        raise BrokerError("the bench needs a Mosquitto on this machine: run `make setup-broker`")
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as name:
        root = Path(name)
        (port,) = free_ports(1)
        home = create_home(root / "home", CoordinatorConfig(broker=BrokerSettings(port=port)))
        made = Bench(home, root, devices)
        revocations = home.revocations.read_text(encoding="ascii")
        lists = Lists(federations=(FEDERATION,), devices=tuple(devices), observers=(), revocations=revocations)
        write_folder(home, home.broker, lists)
        command = [str(mosquitto.binary), "-c", str(write_config(home.broker))]
        with (root / "mosquitto.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, env=mosquitto.environment())
        try:
            _wait_listening(process, port, root / "mosquitto.log")
            yield made
        finally:
            process.kill()
            process.wait()


@contextmanager
def process_of(run: Callable[..., None]) -> Iterator[Any]:
    """Run something in a process of its own; gives our end of its pipe."""
    context = spawning()
    ours, theirs = context.Pipe()
    process = context.Process(target=run, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()
        ours.close()


def expect(pipe: Any) -> Any:
    """The next message from the other end of a pipe.

    Raises:
        BrokerError: nothing comes, or its process ended.
    """
    if not pipe.poll(SECONDS_MAX):
        raise BrokerError(f"a process of the bench sent nothing for {SECONDS_MAX} s")
    try:
        return pipe.recv()
    except EOFError as error:
        raise BrokerError("a process of the bench ended; its traceback is above") from error


def _wait_listening(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    end = time.monotonic() + START_S
    pause = threading.Event()
    while process.poll() is None and time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((LOOPBACK, port)) == 0:
                return
        pause.wait(0.01)
    raise BrokerError(f"mosquitto did not start: {log.read_text(errors='replace')[-500:]}")
