"""A running Ray cluster to compute on, which this machine is a node of.

Imports Ray when a cluster is opened, never before. A cluster is one trust domain: its nodes exchange pickles and run what they
are given; see docs/how-to/simulate.md. Knows nothing of what is computed.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import fedcg
from devices.detect import detect
from experiments.errors import OptionError
from experiments.record import versions

AUTO = "auto"
_REACHED_S = 5.0

Announce = Callable[[str], None]


Build = Mapping[str, str]
"""What must be the same on all nodes, or results could differ or nodes misunderstand each other: versions by package, and a digest."""


def differences(mine: Build, theirs: Build) -> list[str]:
    """What is not the same, as `torch 2.13.0 instead of 2.12.0`."""
    return [f"{name} {mine[name]} instead of {theirs[name]}" for name in mine if mine[name] != theirs[name]]


@functools.cache  # what a process has imported does not change
def own_build() -> Build:
    """The build of this process; `code` is the digest of the sources of `fedcg`, and finds a changed file under an unchanged version."""
    digest, root = hashlib.sha256(), Path(fedcg.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    shared = {name: version for name, version in versions().items() if name != "onnxruntime"}  # a node may lack it
    return {**shared, "code": digest.hexdigest()[:16]}


@functools.cache
def own_processor() -> str:
    """The CPU model of this machine: bit equality is promised within one."""
    return detect().cpu_model or "unknown"


class RayCluster:
    """An open cluster.

    Args:
        announce: prints a line for the operator.
    """

    def __init__(self, announce: Announce) -> None:
        self._announce = announce
        self._announced: set[str] = set()

    def gpus(self) -> int:
        """How many GPUs Ray knows of."""
        return int(cluster_resources().get("GPU", 0))

    def met(self, processor: str) -> None:
        """Take note of the CPU model of a node that answered; announce each that is not this machine's, once."""
        if processor != own_processor():
            self.announce_once(
                f"a node of the cluster has another CPU ({processor}) than this machine ({own_processor()}): "
                "results are not promised to be bit for bit those of one machine"
            )

    def announce_once(self, line: str) -> None:
        """Print a line for the operator, once."""
        if line not in self._announced:
            self._announced.add(line)
            self._announce(line)


def cluster_resources() -> dict[str, float]:
    """CPU, GPU and what else the nodes of the cluster have together now."""
    import ray

    return dict(ray.cluster_resources())  # type: ignore[no-untyped-call]


def slots(threads: int) -> int:
    """How many tasks of so many CPUs the cluster that this process belongs to can run at once now."""
    return int(cluster_resources().get("CPU", 0)) // threads


def check_ray() -> None:
    """Look whether Ray is installed, without importing it.

    Raises:
        ModuleNotFoundError: it is not.
    """
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")


@contextmanager
def open_cluster(address: str, announce: Announce) -> Iterator[RayCluster]:
    """A cluster for the length of the block; it stays.

    Args:
        address: `auto` or HOST:PORT of a running one that this machine is a node of.
        announce: prints a line for the operator.

    Raises:
        OptionError: no such cluster, or a node of it has another build.
    """
    if "://" in address:
        raise OptionError(
            f"--ray {address}: run the command on a machine of the cluster, with --ray auto or --ray HOST:PORT"
        )
    if address != AUTO:
        _check_reachable(address)
    with _connected(address):
        cluster = RayCluster(announce)
        check_nodes(cluster)
        yield cluster


def _check_reachable(address: str) -> None:
    """Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise OptionError(f"--ray {address}: write auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise OptionError(f"no Ray cluster at {address}: {error}; start one with `ray start --head`") from error


@contextmanager
def _connected(address: str) -> Iterator[None]:
    check_ray()
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise OptionError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield
    finally:
        ray.shutdown()


def _describe() -> tuple[Build, str]:
    return own_build(), own_processor()


def check_nodes(cluster: RayCluster) -> None:
    """Ask every node what it is, before anything is started.

    Raises:
        OptionError: a node can't be used; all of them are named.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(_describe)
    known = ray.nodes()  # type: ignore[no-untyped-call]
    nodes = [node for node in known if node["Alive"] and node["Resources"].get("CPU", 0) >= 1]
    if not nodes:
        raise OptionError("no node of the Ray cluster has a CPU to offer")
    asked = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False), num_cpus=0).remote()
        for node in nodes
    ]
    problems = []
    for node, answer in zip(nodes, asked, strict=True):
        name = node["NodeManagerAddress"]
        try:
            build, processor = ray.get(answer)
        except ray.exceptions.RayError as error:
            problems.append(f"{name}: {str(error).strip().splitlines()[-1]}")
            continue
        cluster.met(processor)
        problems += [f"{name}: {difference}" for difference in differences(build, own_build())]
    if problems:
        raise OptionError(
            f"nodes of the Ray cluster that can't be used: {'; '.join(problems)}. Install the same fedcg-edge[ray] on all of them"
        )
