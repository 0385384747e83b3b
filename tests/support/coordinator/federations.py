"""A coordinator in this process: over running services, or with several federations of one database."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from coordinator.config import CoordinatorConfig, render_config
from coordinator.operations.operations import Operations
from coordinator.paths import Home
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.service.coordinator import Coordinator, _Running
from coordinator.service.service import Service
from coordinator.service.service_context import ServiceContext
from fedcg.wire.messages.schemas import COORDINATOR, CoordinatorStatus
from fedcg.wire.transport.transport import Delivery
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.toy_artifacts import aggregate_bytes
from tests.support.coordinator.world import World, rules_of


def no_context(record: FederationRecord) -> ServiceContext:
    """Replaces the dependencies of services, if none may be started."""
    raise AssertionError(f"{record.id} must not be started")


def hosting(service: Service) -> Coordinator:
    """A coordinator whose only service is already running."""
    context = service.context
    made = Coordinator(context.store, context.artifacts, context.events, no_context)
    made._running[context.federation.id] = _Running(service, ThreadPoolExecutor(1), Future())
    return made


class _Follower(FakeDevice):
    """A device that opens a new session for a coordinator of a higher epoch, like a real one."""

    epoch = 0

    def _take(self, delivery: Delivery) -> None:
        super()._take(delivery)
        status = self.received[-1] if self.received else None
        if isinstance(status, CoordinatorStatus) and status.online and status.epoch > self.epoch:
            if self.epoch:
                self.hello()
            self.epoch = status.epoch


class Federations:
    """Federations in the database of a world, each with its own broker and devices; `names` are added to the world's federation."""

    def __init__(self, world: World, *names: str) -> None:
        self.world = world
        self.failures: list[BaseException] = []
        self._brokers = {world.spec.federation: world.broker}
        self._specs = {world.spec.federation: world.spec}
        self.devices: dict[str, list[FakeDevice]] = {
            world.spec.federation: [
                _Follower(device.name, world.broker, world.spec, world.key, key=device.key)
                for device in world.devices.values()
            ]
        }
        for name in names:
            self._add(name)
        events = world.service_context().events
        self.coordinator = Coordinator(world.store, world.artifacts, events, self._context)
        home = Home(world.root)
        home.config_file.write_text(render_config(CoordinatorConfig()))
        self.operations = Operations(home, world.store, events, self.coordinator.follow)

    def _add(self, name: str) -> None:
        world = self.world
        spec = world.spec.model_copy(update={"federation": name})
        broker = MemoryBroker(rules_of(name))
        base = aggregate_bytes(spec, 0, 0, seed=1)
        first = world.store.federation(world.spec.federation)
        policy, artifact = first.policy.model_copy(update={"min_cohort": 1}), world.artifacts.put(spec.canonical())
        record = replace(first, id=name, spec=artifact, created_at=2.0, policy=policy)
        initial = AggregateRecord(name, 0, 0, world.artifacts.put(base), len(base), world.artifacts.put(b"state"), 2.0)
        world.store.add_federation(record, initial)
        self._brokers[name], self._specs[name] = broker, spec
        self.devices[name] = [
            _Follower(device.name, broker, spec, world.key, key=device.key) for device in world.devices.values()
        ]

    def _context(self, record: FederationRecord) -> ServiceContext:
        context = self.world.service_context()
        return replace(
            context,
            federation=record,
            spec=self._specs[record.id],
            connect=lambda will: MemoryTransport(self._brokers[record.id], COORDINATOR, will),
            events=context.events.about(federation=record.id),
        )

    def start(self, federation: str = "tiny") -> None:
        """Start the devices of a federation."""
        for device in self.devices[federation]:
            device.start()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the coordinator; its devices are started by the test."""
        self.coordinator.start(self.failures.append)
        try:
            yield
        finally:
            self.coordinator.close()
            for device in (device for devices in self.devices.values() for device in devices):
                if hasattr(device, "transport"):
                    device.stop()
            assert not self.failures, self.failures
