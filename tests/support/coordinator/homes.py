"""A coordinator's directory with a federation, and a function to call commands."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Engine

from coordinator.cli.opening import create_home
from coordinator.config import ApiSettings, BrokerSettings, CoordinatorConfig, EnrolmentSettings
from coordinator.members.enrolment import make_bundles
from coordinator.paths import Home
from coordinator.rounds.records import AggregateRecord, FederationRecord
from coordinator.storage.database import make_engine
from coordinator.storage.store import Store
from fedcg.learning.spec import FederationSpec
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from tests.support.commands import run_fedcg
from tests.support.coordinator.engine import policy_of
from tests.support.coordinator.toy_artifacts import FEDERATION, aggregate_bytes, tiny_spec
from tests.support.waiting import free_port


def add_federation(
    home: Home, name: str, devices: Sequence[str] = (), *, spec: FederationSpec | None = None, **record: Any
) -> None:
    """Open a federation with spec and initial aggregate; its devices' bundles are in `bundles` next to the home."""
    spec, artifacts = spec or tiny_spec(), ArtifactStore(home.artifacts)
    base = aggregate_bytes(spec, 0, 0, seed=1)
    federation = FederationRecord(name, "fedcg", artifacts.put(spec.canonical()), policy_of(3, 2, 2, 600.0), 1.0)
    federation = replace(federation, **record)
    initial = AggregateRecord(name, 0, 0, artifacts.put(base), len(base), artifacts.put(b"state"), 1.0)
    with closing(Store.of(home)) as store:
        store.add_federation(federation, initial)
        if devices:
            make_bundles(home, store, devices, home.root.parent / "bundles", time.time(), name)


def make_home(root: Path, devices: Sequence[str], **settings: Any) -> Home:
    """Make a coordinator's directory in `root`, with ports of its own and a federation of these devices."""
    ports: dict[str, Any] = {"broker": BrokerSettings(port=free_port()), "api": ApiSettings(port=free_port())}
    config = CoordinatorConfig(**ports, enrolment=EnrolmentSettings(port=free_port()), **settings)
    home = create_home(root / "home", config)
    add_federation(home, FEDERATION, devices)
    return home


def bundle(home: Home, device: str) -> Path:
    """Return the folder of a device's bundle from `add_federation`."""
    return home.root.parent / "bundles" / device


def message_key(home: Home, device: str) -> str:
    """Return the public message key of a device, in hex."""
    with closing(Store.of(home)) as store:
        known = store.device(device)
    assert known is not None
    return known.public_key


def call(*words: object) -> tuple[int, str]:
    """Run a `fedcg` command in this process; return its exit code and output."""
    done = run_fedcg(*words)
    return done.exit_code, done.output


@contextmanager
def closing_engine(database: Path | URL) -> Iterator[Engine]:
    """Yield connections to a database, like those of another process."""
    engine = make_engine(database)
    yield engine
    engine.dispose()
