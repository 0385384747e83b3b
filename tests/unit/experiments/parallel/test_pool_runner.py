"""Worker processes give what one process gives, bit for bit, whoever of them is killed."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.errors import RunError
from experiments.parallel.pool_runner import PoolRunner
from experiments.simulation.batch import RunSetting
from experiments.simulation.batch_runner import default_workers
from experiments.simulation.checkpoints import Checkpoints
from fedcg.learning.method import ClientState
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.simulation.tasks import LocalTask, SerialRunner
from tests.support.learning.learning_cases import NAMES, assert_same_simulation, party_of, same_parts


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolRunner]:
    runner = PoolRunner(2)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "method", ["fedmd_cg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedcg"))]
)
def test_worker_processes_give_the_same_simulation_as_one_process(pool: PoolRunner, method: str) -> None:
    torch.set_num_threads(1)
    one = party_of(method)
    assert_same_simulation(simulate(one, Schedule(rounds=2), runner=pool), simulate(one, Schedule(rounds=2)))


@pytest.mark.slow
def test_killed_workers_are_replaced_and_their_tasks_repeated(pool: PoolRunner) -> None:
    one = party_of("fedavg")
    start = get_method("fedavg").init_client(one.spec, initial_parts(one.spec, one.roots.cohort))
    aggregate = get_method("fedavg").init_server(one.spec, initial_parts(one.spec, one.roots.cohort)).aggregate
    tasks = [LocalTask(name, 1, ClientState(start.parts), None) for name in NAMES]
    pool.start(one)
    outcomes = pool.local(tasks, aggregate)
    found = [next(outcomes)]
    before = {worker.pid for worker in multiprocessing.active_children() if worker.pid}
    for process in before:  # one of them is at work on the second task or has just answered it, the third waits
        os.kill(process, signal.SIGKILL)
    found += outcomes
    assert before.isdisjoint(worker.pid for worker in multiprocessing.active_children())
    serial = SerialRunner()
    serial.start(one)
    expected = {outcome.client: outcome for outcome in serial.local(tasks, aggregate)}
    assert sorted(outcome.client for outcome in found) == list(NAMES)
    for outcome in found:
        wanted = expected[outcome.client].result
        assert outcome.result is not None
        assert wanted is not None
        assert same_parts(outcome.result.private.parts, wanted.private.parts)


def deadly(_party: Party) -> None:
    """A piece of work that ends whoever does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def faulty(_party: Party) -> None:
    """A piece of work with a mistake in it."""
    raise KeyError("what is not there")


class PickyError(Exception):
    """One that a pickle of it does not bring back."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def picky(_party: Party) -> None:
    """A piece of work whose error can't be pickled."""
    raise PickyError("this", "that")


@pytest.mark.slow
def test_a_task_that_kills_every_worker_is_given_up(pool: PoolRunner) -> None:
    pool.start(party_of("fedavg"))
    with pytest.raises(RunError, match="worker processes died over one task"):
        list(pool.answers([(deadly, ())]))


@pytest.mark.slow
def test_an_exception_in_a_worker_is_raised_here_and_the_pool_goes_on(pool: PoolRunner) -> None:
    one = party_of("fedavg")
    pool.start(one)
    with pytest.raises(KeyError, match="what is not there"):
        list(pool.answers([(faulty, ()), (faulty, ())]))
    with pytest.raises(RuntimeError, match="PickyError: this and that"):
        list(pool.answers([(picky, ())]))
    assert simulate(one, Schedule(rounds=1, shadow=False), runner=pool).rounds == 1


def test_as_many_workers_as_cpus_but_not_more_than_clients_and_one_per_accelerator() -> None:
    assert default_workers(1, "cpu") == 1
    assert default_workers(10_000, "cpu") == len(os.sched_getaffinity(0))
    assert default_workers(8, "cuda:0") == 1


@pytest.mark.parametrize("method", ["fedmd_cg", "local"])
def test_a_checkpoint_holds_all_that_a_simulation_needs_to_go_on(method: str, tmp_path: Path) -> None:
    one = party_of(method)
    stages: list[Simulation] = []
    simulate(one, Schedule(rounds=2, shadow=method != "local"), on_round=stages.append)
    store = Checkpoints(tmp_path / "run", RunSetting(rounds=2))
    assert store.newest() is None
    assert store.rounds() == 0
    for number, stage in enumerate(stages, start=1):
        store.save(stage, 1.5 * number)
    found = store.newest()
    assert found is not None
    assert_same_simulation(found[0], stages[1])
    assert found[0].curves == stages[1].curves
    assert found[0].shadows.keys() == stages[1].shadows.keys()
    assert (found[1], store.rounds()) == (3.0, 2)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["round-000002"]  # the older one is gone
    assert Checkpoints(tmp_path / "run", RunSetting(rounds=3)).newest() is None  # another setting's
    store.remove()
    assert store.newest() is None


@pytest.mark.slow
def test_a_checkpoint_cut_off_by_a_power_loss_does_not_count(tmp_path: Path) -> None:
    one, stages = party_of("fedavg"), list[Simulation]()
    simulate(one, Schedule(rounds=2, shadow=False), on_round=stages.append)
    store = Checkpoints(tmp_path, RunSetting())
    store.save(stages[0], 1.0)
    broken = tmp_path / "round-000002"
    broken.mkdir()
    whole = tmp_path / "round-000001"
    (broken / "state.json").write_bytes((whole / "state.json").read_bytes())
    (broken / "tensors.safetensors").write_bytes((whole / "tensors.safetensors").read_bytes()[:1000])
    found = store.newest()
    assert found is not None
    assert found[0].rounds == 1
