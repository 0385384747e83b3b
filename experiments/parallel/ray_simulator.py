"""Runs whole federations on a Ray cluster, several at once: the server half of each is a task that hands out the pieces.

Every run has a process of its own, for torch's default generators belong to a process. It reports each round; when it or its
node dies, the run goes on elsewhere after the last round that was reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from threading import Event
from typing import TYPE_CHECKING, Any

from experiments.errors import OptionError, RunError
from experiments.parallel.ray_cluster import RayCluster
from experiments.parallel.ray_runner import MAX_RETRIES, Demands, RayRunner, original, resources
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import Schedule, Simulation, simulated_rounds

if TYPE_CHECKING:
    from ray import ObjectRef

MOST_LANES = 16  # the process that started the runs keeps the images and states of every one under way
_ROUNDS_AHEAD = 2  # reported and not yet taken, each with all clients' states
_WAKE_S = 0.5

Reported = tuple[frozenset[str], Simulation]


def lanes_for(runs: int, clients: int, slots: int, gpus: int | None) -> int:
    """How many runs go on side by side: enough for every slot to have a client while the server half of one is at work.

    Args:
        runs: to be done.
        clients: of a run.
        slots: tasks that run at once on the cluster.
        gpus: GPUs that runs share; each run's server half keeps a part of one. None for runs on CPUs.
    """
    useful = min(runs, slots // clients + 2, MOST_LANES)
    return max(1, useful if gpus is None else min(useful, gpus))


def host(demands: Demands, party: Party, schedule: Schedule, resume: Simulation | None) -> Iterator[Reported]:
    """On a worker: run a federation, its pieces as tasks; after each round the CPU models met so far and where it stands."""
    demands.meet()
    processors: set[str] = set()
    runner = RayRunner(demands.threads, processors.add)
    for now in simulated_rounds(party, schedule, runner=runner, resume=resume):
        yield frozenset(processors), now


class RaySimulator:
    """Runs federations on an open cluster; several threads may do so at once.

    Args:
        cluster: to compute on.
        threads: torch threads of each task.
        stopping: ends the runs that are under way when it is set.
    """

    def __init__(self, cluster: RayCluster, threads: int, stopping: Event) -> None:
        self._cluster = cluster
        self._threads = threads
        self._stopping = stopping

    def __call__(
        self,
        party: Party,
        schedule: Schedule,
        /,
        *,
        resume: Simulation | None = None,
        on_round: Callable[[Simulation], None] | None = None,
    ) -> Simulation:
        """Run a federation; arguments as those of `simulate`.

        Raises:
            OptionError: it wants a GPU, and the cluster has none.
            RunError: its processes kept dying, or it was stopped.
        """
        import ray
        from ray.exceptions import RayError, RayTaskError

        if party.device != "cpu":
            if self._cluster.gpus() == 0:
                raise OptionError(f"--device {party.device}: no node of the Ray cluster has a GPU")
            party = replace(party, device="cuda")  # Ray chooses a task's GPU and shows it that one alone
        kept, now, deaths = ray.put(party), resume, 0
        while True:
            try:
                for stands in self._rounds(kept, party.device, schedule, now):
                    now, deaths = stands, 0
                    if on_round is not None:
                        on_round(now)
            except RayTaskError as error:
                raise original(error) from error
            except RayError as error:
                deaths += 1
                if deaths > MAX_RETRIES:
                    raise RunError(
                        f"a run's process was lost {deaths} times in one round on the Ray cluster: {error}"
                    ) from error
                continue
            assert now is not None
            return now

    def _rounds(
        self, party: ObjectRef[Party], device: str, schedule: Schedule, resume: Simulation | None
    ) -> Iterator[Simulation]:
        """The rounds that are left, from one process on the cluster."""
        import ray

        submit = ray.remote(host).options(
            max_retries=0,  # it would begin again at `resume`; here it goes on after the last round
            scheduling_strategy="SPREAD",
            _generator_backpressure_num_objects=_ROUNDS_AHEAD,
            **resources(self._threads, device),
        )
        rounds: Any = submit.remote(Demands.of_this_process(self._threads), party, schedule, resume)
        try:
            while True:
                ready, _ = ray.wait([rounds], timeout=_WAKE_S)
                if self._stopping.is_set():
                    raise RunError("the simulation was stopped")
                if not ready:
                    self._look_for_nodes()
                    continue
                try:
                    reported = next(rounds)
                except StopIteration:
                    return
                processors, now = ray.get(reported)
                for processor in processors:
                    self._cluster.met(processor)
                yield now
        finally:
            ray.cancel(rounds)

    def _look_for_nodes(self) -> None:
        if self._cluster.slots(self._threads) == 0:
            self._cluster.announce_once("no node of the Ray cluster can take a task; waiting for one")
