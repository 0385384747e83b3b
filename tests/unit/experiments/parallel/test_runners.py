"""Worker processes give what one process gives, whoever of them is killed; checkpoints; what `--ray` decides before Ray is imported."""

import importlib.util
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import fedcg
from experiments.errors import OptionError, RunError
from experiments.parallel.pool_runner import PoolRunner
from experiments.parallel.ray_cluster import differences, open_cluster, own_build
from experiments.parallel.ray_runner import roots_for, sendable
from experiments.simulation.batch import RunSetting
from experiments.simulation.batch_runner import default_workers
from experiments.simulation.checkpoints import Checkpoints
from experiments.simulation.party_builder import WireCoding
from fedcg.errors import FedcgError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import ClientState, Update
from fedcg.learning.networks.plans import initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.simulation.party import Party, Roots
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulate
from fedcg.learning.simulation.tasks import LocalTask, SerialRunner, TeacherTask, local_task
from tests.support.commands import fails
from tests.support.learning.learning_cases import NAMES, assert_same_simulation, party_of, same, same_parts
from tests.support.present import present
from tests.support.simulations import QUIET, WORDS


@pytest.fixture(scope="module")
def pool() -> Iterator[PoolRunner]:
    runner = PoolRunner(2)
    yield runner
    runner.close()


@pytest.mark.parametrize(
    "method", ["fedmd_cg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedcg"))]
)
def test_worker_processes_give_the_same_simulation_as_one_process(pool: PoolRunner, method: str) -> None:
    plain = party_of(method)
    one = replace(plain, coding=WireCoding(plain.spec))
    assert_same_simulation(simulate(one, Schedule(rounds=2), runner=pool), simulate(one, Schedule(rounds=2)))


@pytest.mark.slow
def test_killed_workers_are_replaced_and_their_tasks_repeated(pool: PoolRunner) -> None:
    one = party_of("fedavg")
    method, parts = get_method("fedavg"), initial_parts(one.spec, one.roots.cohort)
    aggregate = method.init_server(one.spec, parts).aggregate
    tasks = [LocalTask(name, 1, ClientState(method.init_client(one.spec, parts).parts), None) for name in NAMES]
    pool.start(one)
    outcomes = pool.answers(local_task, tasks, aggregate)
    found = [next(outcomes)]
    before = {worker.pid for worker in multiprocessing.active_children() if worker.pid}
    for process in before:  # one of them is at work on the second task or has just answered it, the third waits
        os.kill(process, signal.SIGKILL)
    found += outcomes
    assert before.isdisjoint(worker.pid for worker in multiprocessing.active_children())
    serial = SerialRunner()
    serial.start(one)
    expected = {outcome.client: outcome for outcome in serial.answers(local_task, tasks, aggregate)}
    assert sorted(outcome.client for outcome in found) == list(NAMES)
    for outcome in found:
        wanted = expected[outcome.client].result
        assert same_parts(present(outcome.result).private.parts, present(wanted).private.parts)


ANY = TeacherTask(1, Update("a", {}, 1))


def deadly(_party: Party, _task: TeacherTask, _server: None) -> None:
    """A piece of work that ends whoever does it."""
    os.kill(os.getpid(), signal.SIGKILL)


def faulty(_party: Party, _task: TeacherTask, _server: None) -> None:
    """A piece of work with a mistake in it."""
    raise KeyError("what is not there")


class PickyError(Exception):
    """One that a pickle of it does not bring back."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def picky(_party: Party, _task: TeacherTask, _server: None) -> None:
    """A piece of work whose error can't be pickled."""
    raise PickyError("this", "that")


@pytest.mark.slow
def test_a_task_that_kills_every_worker_is_given_up_an_error_raised_here_and_the_pool_goes_on(pool: PoolRunner) -> None:
    one = party_of("fedavg")
    pool.start(one)
    with pytest.raises(RunError, match="worker processes died at one task"):
        list(pool.answers(deadly, [ANY], None))
    with pytest.raises(FedcgError, match=r"KeyError: 'what is not there' \(test_runners\.py, line \d+, in faulty\)"):
        list(pool.answers(faulty, [ANY, ANY], None))
    with pytest.raises(RuntimeError, match="PickyError: this and that"):
        list(pool.answers(picky, [ANY], None))
    assert simulate(one, Schedule(rounds=1, shadow=False), runner=pool).rounds == 1


def test_as_many_workers_as_cpus_but_not_more_than_clients_and_one_per_accelerator() -> None:
    assert default_workers(1, "cpu") == 1
    assert default_workers(10_000, "cpu") == len(os.sched_getaffinity(0))
    assert default_workers(8, "cuda:0") == 1


@pytest.mark.parametrize("method", ["fedmd_cg", "local", "fedgh"])
def test_a_checkpoint_holds_all_that_a_simulation_needs_to_go_on(method: str, tmp_path: Path) -> None:
    stages: list[Simulation] = []
    simulate(party_of(method), Schedule(rounds=2, shadow=method != "local"), on_round=stages.append)
    store, folder = Checkpoints(tmp_path / "run", RunSetting(rounds=2)), tmp_path / "run"
    assert (store.newest(), store.rounds()) == (None, 0)
    store.save(stages[0], 1.5)
    older = (folder / "round-000001.pt").read_bytes()
    extras = {"raw": {"0.weight": torch.tensor([1.5, -2.0])}, "done": {"steps": torch.tensor([7])}}
    states = {**stages[1].states, "b": replace(stages[1].states["b"], extras=extras)}
    last = replace(stages[1], states=states, update_bytes=(7,))
    store.save(last, 3.0)
    found, seconds = present(store.newest())
    assert_same_simulation(found, last)
    assert (found.curves, found.shadows.keys()) == (last.curves, last.shadows.keys())
    assert (seconds, store.rounds(), found.update_bytes) == (3.0, 2, (7,))
    assert found.states["a"].extras.keys() == last.states["a"].extras.keys()
    assert found.states["b"].extras.keys() == extras.keys()
    assert all(same(found.states["b"].extras[name], weights) for name, weights in extras.items())
    assert [path.name for path in folder.iterdir()] == ["round-000002.pt"]  # the older one is gone
    assert Checkpoints(folder, RunSetting(rounds=3)).newest() is None  # another setting's
    (folder / "round-000001.pt").write_bytes(older)
    os.truncate(folder / "round-000002.pt", 1000)  # cut off by a power loss
    assert present(store.newest())[0].rounds == 1
    store.remove()
    assert store.newest() is None


def test_without_the_package_the_command_names_the_extra_and_makes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else found(name, *rest))
    out = tmp_path / "out"
    assert "pip install 'fedcg-edge[ray]'" in fails(2, "simulate", *WORDS.split(), "--ray=auto", "--out", out)
    assert not out.exists()


@pytest.mark.slow
def test_ray_is_imported_neither_for_help_nor_for_a_simulation_without_it(tmp_path: Path) -> None:
    for arguments in ("simulate --help", f"simulate {WORDS} {QUIET} --method local --out {tmp_path / 'out'}"):
        code = (
            f"import sys; sys.argv[1:] = {arguments.split()!r}\nfrom fedcg.cli import main\n"
            "try:\n    main()\nfinally:\n    print('loaded:', 'ray' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
        assert "loaded: False" in done.stdout


def test_an_address_where_nobody_listens_that_is_none_or_is_a_ray_clients_is_refused_with_what_to_do_instead() -> None:
    with socket.socket() as held:  # bound, not listening: no other process can come to listen there meanwhile
        held.bind(("127.0.0.1", 0))
        for address, why in (
            (f"127.0.0.1:{held.getsockname()[1]}", "ray start --head"),
            ("head", "HOST:PORT"),
            ("127.0.0.1:99999", "no Ray"),
            ("ray://head:10001", "on a node of the cluster"),
        ):
            with pytest.raises(OptionError, match=why), open_cluster(address, print):
                pass


def test_every_difference_between_builds_is_told_and_a_changed_source_file_is_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "one.py").write_text("a = 1")
    monkeypatch.setattr(fedcg, "__file__", str(tmp_path / "__init__.py"))
    mine = own_build.__wrapped__()
    assert differences(mine, own_build.__wrapped__()) == []
    (tmp_path / "one.py").write_text("a = 2")
    other = {**own_build.__wrapped__(), "torch": "2.12.0"}
    assert differences(mine, other) == [
        f"torch {mine['torch']} instead of 2.12.0",
        f"code {mine['code']} instead of {other['code']}",
    ]


def test_a_node_gets_the_secret_of_the_client_that_it_trains_and_no_other() -> None:
    roots = Roots(b"cohort", b"coordinator", {"a": b"one", "b": b"two"})
    assert roots_for(roots, "b") == Roots(b"cohort", b"", {"b": b"two"})


def test_a_part_of_a_larger_tensor_is_sent_without_the_rest() -> None:
    everything = torch.arange(4 * 3 * 8 * 8, dtype=torch.int64).to(torch.uint8).view(4, 3, 8, 8)
    part = ImageSet(everything[1:3], torch.tensor([0, 1]), ("x", "y"))
    sent = sendable(part)
    assert torch.equal(sent.images, part.images)
    assert sent.images.untyped_storage().nbytes() == 2 * 3 * 8 * 8
    assert sendable(sent) is sent
