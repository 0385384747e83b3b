"""The stage of `fedcg bench coordinator`: a home with a federation of a real method, its devices, and a recorded update."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from coordinator.broker.access_lists import publish_access
from coordinator.members.enrolment import enrol
from coordinator.operations.operations import open_federation
from coordinator.paths import Home
from coordinator.storage.locks import changing_members
from coordinator.storage.store import Store
from experiments.bench.coordinator.replay import Replay
from experiments.bench.transport.broker import FEDERATION, SECONDS_MAX, device_name, device_processes
from experiments.simulation.batch import RunSetting
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.wire.artifacts.artifact_store import ArtifactStore
from fedcg.wire.artifacts.payload import PartArrays
from fedcg.wire.parts import DEFAULT_AGGREGATE_CODEC, DEFAULT_UPDATE_CODEC, Report
from fedcg.wire.transfer.windows import limits_for

SERVER_ITERATIONS = 20


def set_up(home: Home, sessions: int, rounds: int) -> list[Callable[..., None]]:
    """Make the federation, the devices, and the update that they send, while the broker runs. Uses torch.

    Returns:
        What each process of devices runs, as arguments of `process_of`.
    """
    run = RunSetting(
        clients=1,
        partition="iid",
        images_per_client=200,
        rounds=rounds,
        generator="mlp_small",
        codec=DEFAULT_UPDATE_CODEC,
        aggregate_codec=DEFAULT_AGGREGATE_CODEC,
        quick=True,
        params={"server_iterations": SERVER_ITERATIONS},
    )
    quorum = {"min_clients": sessions, "min_cohort": 1, "deadline_s": SECONDS_MAX}
    plan = plan_from_mapping({**run.plan(run.source()), "federation": FEDERATION, **quorum})
    devices, names = home.root.parent / "devices", tuple(map(device_name, range(sessions)))
    with contextlib.closing(Store.of(home)) as store, changing_members(home):
        record = open_federation(home, store, plan)
        enrol(home, store, names, devices, time.time())
        publish_access(home)
    spec = ArtifactStore(home.artifacts).get(record.spec)
    replay = Replay(spec, *_recorded(run, FederationSpec.parse(spec)))
    return device_processes(home, devices, names, limits_for(), replay.update)


def _recorded(run: RunSetting, spec: FederationSpec) -> tuple[PartArrays, Report]:
    """What the first local round of a client shares and reports."""
    import torch

    from experiments.data.client_datasets import build_cohort
    from experiments.simulation.party_builder import party_of
    from fedcg.learning.networks.plans import initial_parts
    from fedcg.learning.registry import get_method
    from fedcg.learning.tensor_conversion import to_arrays

    torch.set_num_threads(1)
    party, method = party_of(run, spec, build_cohort(run.source(), spec.image, run.deal())), get_method(spec.method)
    initial, ((name, dataset),) = initial_parts(spec, party.roots.cohort), party.datasets.items()
    aggregate, state = method.init_server(spec, initial).aggregate, method.init_client(spec, initial)
    result = method.local_round(state, dataset.train, aggregate, party.client_context(name, 1))
    return to_arrays(result.shared.parts), result.report
