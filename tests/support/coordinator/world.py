"""A coordinator's directory and service with scripted devices and a worker without torch, on an in-memory broker."""

import asyncio
import threading
from collections.abc import Callable, Container, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self

from coordinator.aggregation.jobs import Assessed, Job, JobDone, OpenedSum, UpdateAdded, Updates, WorkerSettings
from coordinator.config import RobustnessSettings, RoundSettings
from coordinator.facts.known import Known
from coordinator.facts.problems import Problem, open_problems
from coordinator.pki.signing_keys import SigningIdentity
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.service.service import Service
from coordinator.service.service_context import MakeWorker, ServiceContext
from coordinator.storage.event_store import coordinator_log
from coordinator.storage.store import Store
from coordinator.updates.robustness import Distances, Figures
from fedcg.event_log import read_events
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore, Remote
from fedcg.wire.messages.envelopes import SigningKey
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.messages.topics import Topics
from tests.support.broker.memory import MemoryBroker, MemoryTransport
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.fake_device import FakeDevice
from tests.support.coordinator.no_worker import NoWorker
from tests.support.coordinator.toy_artifacts import aggregate_bytes, tiny_spec
from tests.support.waiting import wait_until

DEADLINE_S = 30.0
ALL_FIRST = RoundSettings(gather_s=600.0, retry_s=0.0)
"""A round opens when all devices are online."""
MakeWorld = Callable[..., "World"]


def rules_of(federation: str) -> Callable[[str, str, str], bool]:
    """Return the rules for publishing and reading a federation's topics."""
    topics = Topics(federation)
    return lambda identity, action, topic: (
        topics.may_publish(identity, topic) if action == "publish" else topics.may_read(identity, topic)
    )


class PlainWorker(NoWorker):
    """Merges immediately and without torch: the aggregate only depends on the round. Records its requests.

    Attributes:
        result: changed fields of the merge's result.
    """

    result: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, settings: WorkerSettings, notify: Callable[[Any], None]) -> None:
        super().__init__(settings, notify)
        self._reply = notify
        self.asked: list[object] = []

    def open(self, job: Job) -> None:
        super().open(job)
        self.asked.append(("open", job.round, job.attempt))

    def add(self, client: str, artifact: str) -> None:
        assert self.job is not None
        self.asked.append(("add", client, artifact))
        self._reply(UpdateAdded(self.job.round, self.job.attempt, client))

    def finish(self, updates: Updates, limits: Distances, opened: OpenedSum = OpenedSum()) -> None:
        assert self.job is not None
        self.asked.append(("finish", updates))
        store = ArtifactStore(self.settings.artifacts)
        merged = self.merge(FederationSpec.parse(store.get(self.job.spec)), self.job.round, self.job.attempt)
        done = JobDone(self.job.round, self.job.attempt, store.put(merged), len(merged), store.put(b"state"))
        self._reply(replace(done, **self.result))

    def merge(self, spec: FederationSpec, round_number: int, attempt: int) -> bytes:
        return aggregate_bytes(spec, round_number, attempt, seed=100 + round_number)

    def stop(self) -> None:
        self.asked.append("stop")


@dataclass
class World:
    """A coordinator's directory without certificates, on an in-memory broker, with devices; and its running service."""

    root: Path
    spec: FederationSpec = field(default_factory=tiny_spec)
    base: bytes = b""
    server_state: bytes = b"state"
    clients: tuple[str, ...] = ("a", "b")
    make_worker: MakeWorker | None = None
    min_clients: int = 2
    max_attempts: int = 3
    deadline_s: float = 600.0
    public_data: Path | None = None
    keep_rounds: int = 10
    pacing: RoundSettings = field(default_factory=lambda: RoundSettings(gather_s=0.0, retry_s=0.0))
    remote: Remote | None = None
    robustness: RobustnessSettings = field(default_factory=RobustnessSettings)

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(rules_of(self.spec.federation))
        self.key = SigningKey.generate()
        self.signing_identity = SigningIdentity(self.key)
        self.root.mkdir(parents=True, exist_ok=True)
        self.store = Store(self.root / "database.sqlite")
        self.artifacts = ArtifactStore(self.root / "artifacts", self.remote)
        self.base = self.base or aggregate_bytes(self.spec, 0, 0, seed=1)
        self.base_id = self.artifacts.put(self.base)
        federation = FederationRecord(
            self.spec.federation,
            self.spec.method,
            self.artifacts.put(self.spec.canonical()),
            policy_of(self.spec.rounds, self.min_clients, self.max_attempts, self.deadline_s),
            1.0,
        )
        initial = AggregateRecord(
            self.spec.federation, 0, 0, self.base_id, len(self.base), self.artifacts.put(self.server_state), 1.0
        )
        self.store.add_federation(federation, initial)
        self.workers: list[Any] = []
        self.devices = {name: FakeDevice(name, self.broker, self.spec, self.key) for name in self.clients}
        for device in self.devices.values():
            self.store.add_device(device.name, device.key.public.hex, 1.0)

    def service_context(self) -> ServiceContext:
        def make_worker(settings: WorkerSettings, notify: Callable[[Any], None]) -> Any:
            self.workers.append((self.make_worker or PlainWorker)(settings, notify))
            return self.workers[-1]

        return ServiceContext(
            federation=self.store.federation(self.spec.federation),
            spec=self.spec,
            store=self.store,
            artifacts=self.artifacts,
            connect=lambda will: MemoryTransport(self.broker, COORDINATOR, will),
            signing_identity=lambda: self.signing_identity,
            worker=WorkerSettings(1, "cpu", b"s" * 32, self.root / "artifacts", self.root / "spill", self.public_data),
            events=coordinator_log(self.root / "events.jsonl", self.store.events),
            make_worker=make_worker,
            keep_rounds=self.keep_rounds,
            rounds=self.pacing,
            robustness=self.robustness,
        )

    def change_policy(self, **fields: object) -> None:
        policy = self.store.federation(self.spec.federation).policy
        self.store.set_policy(self.spec.federation, policy.model_copy(update=fields))

    def known(self, service: Service | None = None, spec: FederationSpec | None = None) -> Known:
        """Return the sources of facts, with the running service if there is one, and with another spec if given."""
        services = {} if service is None else {self.spec.federation: service}
        return Known(self.store, lambda _: spec or self.spec, self.root, services)

    def problems(self, service: Service | None = None) -> dict[str, Problem]:
        """Return the open problems by kind."""
        return {each.kind: each for each in open_problems(self.known(service))}

    def merges(self) -> list[Updates]:
        """Return the merge requests to the workers."""
        return [item[1] for worker in self.workers for item in worker.asked if item[0] == "finish"]

    def start_devices(self) -> None:
        for device in self.devices.values():
            device.start()

    def run(self, until: str = "finished") -> dict[str, Any]:
        """Run the service with all devices until an event, and return the event."""
        with RunningService(self):
            self.start_devices()
            return self.wait_event(until)

    def close(self) -> None:
        for device in self.devices.values():
            if hasattr(device, "transport"):
                device.stop()
        self.store.close()

    def events(self, name: str = "") -> list[dict[str, Any]]:
        found = read_events(self.root / "events.jsonl")
        return [dict(event) for event in found if name in ("", event["event"])]

    def wait_event(self, name: str, count: int = 1) -> dict[str, Any]:
        wait_until(lambda: len(self.events(name)) >= count, f"{name} x{count}; so far {self.events()[-8:]}")
        return self.events(name)[count - 1]

    def wait_finished(self) -> str:
        """Wait until all devices have the final aggregate; return its id."""
        final = str(self.wait_event("finished")["aggregate"])
        for device in self.devices.values():
            wait_until(partial(device.artifacts.__contains__, final), f"{device.name} has the final aggregate")
        return final


Beside = Callable[[Service], AbstractAsyncContextManager[None]]


class RunningService:
    """A service on the event loop of its own thread."""

    def __init__(self, world: World, beside: Beside = lambda service: nullcontext()) -> None:
        self._world = world
        self._beside = beside
        self._failure: BaseException | None = None
        self._up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._up.wait(DEADLINE_S)
        self._reraise()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._reraise()

    @property
    def service(self) -> Service:
        return self._service

    def stop(self) -> None:
        if self._thread.is_alive():
            self._service.stop()
            self._thread.join(DEADLINE_S)

    def vanish(self) -> None:
        """End like a killed process: the link drops with the will, and nothing is flushed."""
        self._world.broker.drop(COORDINATOR)
        self.stop()

    def _reraise(self) -> None:
        if self._failure is not None:
            raise AssertionError("the service failed") from self._failure

    async def _main(self) -> None:
        loop, thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, "service")
        try:
            self._service = await loop.run_in_executor(thread, Service, self._world.service_context())
            try:
                await loop.run_in_executor(thread, self._service.start)
                async with self._beside(self._service):
                    self._up.set()
                    await loop.run_in_executor(thread, self._service.run)
            finally:
                await loop.run_in_executor(thread, self._service.close)
        except BaseException as error:  # noqa: BLE001 - raised in the test's own thread
            self._failure = error
        finally:
            self._up.set()


FINE, ODD = Figures(1.0, 0.6, 0.6), Figures(3.5, -0.5, 0.6)
REASON = "its step points away from the others' (cosine -0.50, median 0.60, at least 0.30)"
TOO_LONG = "its step is 3.5 times as long as the median (at most 3)"


class OddC(PlainWorker):
    """Report that c's step points away; in every round without `rounds`."""

    def __init__(self, *arguments: Any, rounds: Container[int] = range(1, 1000)) -> None:
        super().__init__(*arguments)
        self._odd_rounds = rounds

    def assess(self, updates: Mapping[str, str]) -> None:
        assert self.job is not None
        self.asked.append(("assess", tuple(updates)))
        figures = {client: ODD if client == "c" and self.job.round in self._odd_rounds else FINE for client in updates}
        self._reply(Assessed(self.job.round, self.job.attempt, figures))
