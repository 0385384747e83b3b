"""Simulations on a Ray cluster: distributes the pieces of a run.

On one CPU model the results equal those of one process, bit for bit. If a worker or node dies, its pieces are repeated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from socket import gethostname
from typing import TYPE_CHECKING, Any

import torch

from experiments.errors import RunError
from experiments.parallel.ray_cluster import Build, differences, own_build, own_processor, slots
from fedcg.learning.image_set import ImageSet
from fedcg.learning.simulation.party import ClientData, Party, Roots
from fedcg.learning.simulation.tasks import Answer, Shared, Task, TeacherTask
from fedcg.learning.split_names import ALLOW_VARIABLE, WEIGHTS_VARIABLE
from fedcg.values import Value

if TYPE_CHECKING:
    from ray import ObjectRef


MAX_RETRIES = 3  # a task that kills four workers (probably out of memory) would kill the fifth
GPU_SHARE = 0.25  # of a GPU per task: networks of this size use a small part of it


class Demands(Value):
    """The setup of a worker before it computes anything.

    Attributes:
        build: the required build of the worker.
        threads: number of torch threads.
        splits: the user's own networks that may be imported (`fedcg.learning.split_names`).
        weights: files and folders with weights of backbones (`fedcg.learning.split_names`).
    """

    build: Build
    threads: int
    splits: str
    weights: str

    @staticmethod
    def of_this_process(threads: int) -> Demands:
        """Return the setup that makes a worker like this process."""
        return Demands(own_build(), threads, *(os.environ.get(name, "") for name in (ALLOW_VARIABLE, WEIGHTS_VARIABLE)))

    def meet(self) -> None:
        """Set up this process, a worker.

        Raises:
            RunError: this node has another build.
        """
        if found := differences(own_build(), self.build):
            raise RunError(
                f"the node {gethostname()} of the Ray cluster can't be used: {'; '.join(found)}. "
                "Install the same fedcg-edge[ray] on all of them"
            )
        os.environ[ALLOW_VARIABLE] = self.splits  # workers of a running cluster don't inherit these two
        os.environ[WEIGHTS_VARIABLE] = self.weights
        torch.set_num_threads(self.threads)


def resources(threads: int, device: str) -> dict[str, float]:
    """Return the resources of a task, as Ray's options."""
    return {"num_cpus": threads, "num_gpus": 0 if device == "cpu" else GPU_SHARE}


def _work(
    demands: Demands, function: Callable[..., Any], party: Party, common: ImageSet | None, *given: Any
) -> tuple[str, Any]:
    """On a worker: return the CPU model, and the result of the function."""
    demands.meet()
    return own_processor(), function(replace(party, common=common), *given)


class RayRunner:
    """A runner on the cluster of this process; closing the runner keeps the cluster.

    Args:
        threads: torch threads and CPUs of each task.
        met: called with the CPU model of each task.
    """

    def __init__(self, threads: int = 1, met: Callable[[str], object] = lambda _processor: None) -> None:
        self._threads = threads
        self._met = met
        self._clients: dict[str, ObjectRef[Party]] = {}
        self._server: ObjectRef[Party] | None = None
        self._common: ObjectRef[ImageSet | None] | None = None
        self._resources = resources(threads, "cpu")

    def start(self, party: Party) -> None:
        """Put a federation's data into the object store, instead of the previous federation's."""
        import ray

        bare = replace(party, datasets={}, common=None, public=None)
        self._resources = resources(self._threads, party.device)
        self._clients = {
            name: ray.put(replace(bare, datasets={name: _own(data)}, roots=roots_for(party.roots, name)))
            for name, data in party.datasets.items()
        }
        self._server = ray.put(replace(bare, public=party.public, roots=replace(party.roots, devices={})))
        self._common = ray.put(None if party.common is None else sendable(party.common))

    def close(self) -> None:
        """Release the data."""
        self._clients, self._server, self._common = {}, None, None

    def answers(
        self, function: Callable[[Party, Task, Shared], Answer], tasks: Sequence[Task], shared: Shared
    ) -> Iterator[Answer]:
        """Yield answers in the order of arrival; only about as many tasks as can run are submitted, so that memory stays bounded.

        Raises:
            RunError: a piece killed several workers.
        """
        import ray

        submit = ray.remote(_work).options(max_retries=MAX_RETRIES, scheduling_strategy="SPREAD", **self._resources)
        demands = Demands.of_this_process(self._threads)
        put, left = ray.put(shared), iter(tasks)
        running: set[ObjectRef[Any]] = set()
        try:
            while True:
                room = max(0, slots(self._threads) + 1 - len(running))
                for task in islice(left, room):
                    party = self._server if isinstance(task, TeacherTask) else self._clients[task.client]
                    running.add(submit.remote(demands, function, party, self._common, task, put))
                if not running:
                    return
                (ended,), _ = ray.wait(list(running), num_returns=1)
                running.discard(ended)
                processor, value = _answer(ended)
                self._met(processor)
                yield value
        finally:
            for unwanted in running:
                ray.cancel(unwanted)


def _answer(reference: ObjectRef[Any]) -> Any:
    """Return the result of a task, or raise its exception."""
    import ray
    from ray.exceptions import RayError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise original(error) from error
    except RayError as error:
        raise RunError(
            f"a task was lost {MAX_RETRIES + 1} times on the Ray cluster, probably out of memory: {error}"
        ) from error


def original(error: Any) -> Exception:
    """Return the exception of a task, without Ray's additions; Ray's own if the exception could not be sent."""
    return error.cause if isinstance(error.cause, Exception) else RunError(f"a task on the Ray cluster failed: {error}")


def roots_for(roots: Roots, client: str) -> Roots:
    """Return the random streams of a client's tasks; a task needs no other client's secrets."""
    return Roots(roots.cohort, b"", {client: roots.devices[client]})


def _own(data: ClientData) -> ClientData:
    return replace(data, train=sendable(data.train), val=sendable(data.val), test=sendable(data.test))


def sendable(images: ImageSet) -> ImageSet:
    """Return the images as separate tensors: views would be pickled with the larger tensor."""
    if images.images.untyped_storage().nbytes() == images.images.nbytes:
        return images
    return replace(images, images=images.images.clone(), labels=images.labels.clone())
