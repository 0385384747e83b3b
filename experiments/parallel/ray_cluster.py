"""A running Ray cluster for computations, with this machine as a node.

Ray is only imported when a cluster is opened. A cluster is one trust domain: its nodes exchange pickles and run
received code; see docs/how-to/scale-out.md. Independent of the computation.
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
"""Everything that must be equal on all nodes for equal results and compatible messages: versions by package, and a digest."""


def differences(mine: Build, theirs: Build) -> list[str]:
    """Return the differences, such as `torch 2.13.0 instead of 2.12.0`."""
    return [f"{name} {mine[name]} instead of {theirs[name]}" for name in mine if mine[name] != theirs[name]]


@functools.cache  # a process keeps the code that it imported
def own_build() -> Build:
    """Return the build of this process; `code` is the digest of the sources of `fedcg`, to detect changed files of an unchanged version."""
    digest, root = hashlib.sha256(), Path(fedcg.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    shared = {name: version for name, version in versions().items() if name != "onnxruntime"}  # a node may lack it
    return {**shared, "code": digest.hexdigest()[:16]}


@functools.cache
def own_processor() -> str:
    """Return the CPU model of this machine; bit equality is only guaranteed on one model."""
    return detect().cpu_model or "unknown"


def slots(threads: int) -> int:
    """Return how many tasks with this number of CPUs the cluster of this process can run in parallel now."""
    import ray

    return int(ray.cluster_resources().get("CPU", 0)) // threads  # type: ignore[no-untyped-call]


def check_ray() -> None:
    """Check whether Ray is installed, without importing it.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    if importlib.util.find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")


@contextmanager
def open_cluster(address: str, announce: Announce) -> Iterator[Announce]:
    """Connect to a cluster during the block; the cluster keeps running.

    Yields a function that takes the CPU model of a node that answered, and announces each other model than this machine's, once.

    Args:
        address: `auto` or HOST:PORT of a running cluster with this machine as a node.
        announce: prints a line for the operator.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        OptionError: no such cluster.
    """
    if "://" in address:
        raise OptionError(f"--ray {address}: run it on a node of the cluster, with --ray auto or --ray HOST:PORT")
    if address != AUTO:
        _check_reachable(address)
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise OptionError(f"no Ray cluster at {address}: {error}") from error

    @functools.cache
    def met(processor: str) -> None:
        if processor != own_processor():
            announce(
                f"a node of the cluster has another CPU ({processor}) than this machine ({own_processor()}): "
                "results may differ in the last bits from those of one machine"
            )

    try:
        yield met
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Fail fast: Ray itself would try for two minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise OptionError(f"--ray {address}: write auto or HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACHED_S).close()
    except (OSError, OverflowError) as error:
        raise OptionError(f"no Ray cluster at {address}: {error}; start one with `ray start --head`") from error
