"""What many tests share: a throw-away PKI, and real Mosquitto brokers with mutual TLS."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from coordinator.operations import create_federation
from fedcg.find_mosquitto import find_mosquitto
from tests.support.broker.brokers import DEVICES, Pki, QueueLimits, RunningMosquitto
from tests.support.postgres import WHY_MISSING, Cluster, programs, running_cluster

# Under CI the examples are the same in every run; elsewhere each run looks at new ones. Timings are never asserted.
settings.register_profile("explore", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "explore")

StartMosquitto = Callable[..., RunningMosquitto]


@pytest.fixture(scope="session", autouse=True)
def _plans_are_completed_here() -> Iterator[None]:
    """By the same function as in a process of its own, which would load torch for each; tests of commands have that process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(create_federation, "in_a_process", lambda given, stopping=None: create_federation.answer(given))
        yield


@pytest.fixture(scope="session", autouse=True)
def _children_find_the_tests() -> Iterator[None]:
    """Child processes import nothing from the folder that they start in; some of them run what a test names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[1]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def _children_heed_ctrl_c() -> None:
    """A shell that runs the tests in its background has SIGINT ignored, which every process of a test would inherit."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority with certificates for the broker, the coordinator, an observer and the devices a, b, c."""
    return Pki.create(tmp_path_factory.mktemp("pki"), ("coordinator", "observer", *DEVICES))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a Mosquitto visibly where there is none; under CI=true that is an error."""
    if item.get_closest_marker("broker") and find_mosquitto() is None:
        why = "no mosquitto on PATH, in /usr/sbin, or in FEDCG_BROKER_DIR; run `make setup-broker`"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(why)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Cluster]:
    """A PostgreSQL on loopback; tests that need one are skipped visibly without its programs, which under CI=true is an error."""
    if programs() is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(WHY_MISSING)
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def mosquitto(pki: Pki, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartMosquitto]:
    """`start(acl, **options)`: a Mosquitto on a free loopback port, stopped at the end of the session."""
    found = find_mosquitto()
    assert found is not None, "mark the test with `broker`"
    started: list[RunningMosquitto] = []

    def start(acl: str, *, limits: QueueLimits | None = None, authority: Pki = pki) -> RunningMosquitto:
        folder = tmp_path_factory.mktemp("mosquitto")
        broker = RunningMosquitto(found, authority, folder, acl, limits or QueueLimits())
        started.append(broker)
        broker.start()
        return broker

    yield start
    for broker in started:
        broker.stop()
