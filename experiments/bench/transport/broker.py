"""What the benches with sessions share: a coordinator's home, devices with bundles, a Mosquitto by its command, processes with a pipe."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig
from coordinator.errors import BrokerError
from coordinator.paths import Home
from coordinator.pki.signing_keys import load_signing_identity
from coordinator.storage.store import Store
from experiments.bench.transport.peers import MakeUpdate, Party, run_devices
from experiments.demo.processes import Children, children, fedcg
from experiments.demo.run_folder import LOOPBACK, free_ports
from fedcg.find_mosquitto import find_mosquitto
from fedcg.wire.transfer.windows import LinkLimits
from fedcg.wire.transport.mqtt_config import MqttConfig, TlsFiles
from fedcg.worker_process import spawning

FEDERATION = "bench"
SECONDS_MAX = 300.0
READY_S = 60.0
PROCESSES = 2
"""Of devices."""


def device_name(number: int) -> str:
    """The id of a bench device."""
    return f"device-{number:04}"


def new_home(root: Path) -> Home:
    """The home of a coordinator on free ports of this machine."""
    broker_port, api_port = free_ports(2)
    config = CoordinatorConfig(broker=BrokerSettings(port=broker_port, host=LOOPBACK), api=ApiSettings(port=api_port))
    return create_home(root / "home", config)


@asynccontextmanager
async def running_broker(home: Home) -> AsyncIterator[Children]:
    """The broker of a home, by its command, while the context lasts; further processes may be started beside it.

    Raises:
        BrokerError: no Mosquitto here.
        ProcessError: it does not start.
    """
    if find_mosquitto() is None:
        raise BrokerError("the bench needs a Mosquitto on this machine: run `make setup-broker`")
    async with children(home.root / "logs") as processes:
        broker = await processes.start("broker", fedcg("broker", "run", "--dir", home.root), outlives_others=True)
        await processes.line(broker, "ready", READY_S)
        yield processes


def device_processes(
    home: Home, bundles: Path, names: Sequence[str], limits: LinkLimits, make_update: MakeUpdate
) -> list[Callable[..., None]]:
    """What each process of devices runs, as arguments of `process_of`.

    Args:
        home: of their coordinator.
        bundles: folder with each device's bundle.
        names: of the devices.
        limits: how they use their links.
        make_update: makes their updates.
    """
    with contextlib.closing(Store.of(home)) as store:
        coordinator = load_signing_identity(home, store).key.public.hex
    parties = [_party(home, bundles / name, name, limits) for name in names]
    shares = [tuple(parties[first::PROCESSES]) for first in range(min(PROCESSES, len(parties)))]
    return [partial(run_devices, share, coordinator, make_update) for share in shares]


def _party(home: Home, bundle: Path, name: str, limits: LinkLimits) -> Party:
    broker = home.config().broker
    tls = TlsFiles(*(bundle / "tls" / file for file in ("ca.pem", "device.pem", "device.key")))
    mqtt = MqttConfig(broker.host, broker.port, name, tls=tls, protocol="5", in_flight=limits.in_flight)
    return Party(mqtt, FEDERATION, bundle / "signing.key", bundle / "artifacts", limits)


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
