"""The memory and CPU limits of the container or service around this process: control groups v2 and v1."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from devices.files import available_memory, read_int, read_text

# Without a limit, v1 reports the largest page-aligned 63-bit number instead of a word.
_UNLIMITED_V1 = 1 << 60


def memory_limit(root: Path) -> int | None:
    """The tightest memory limit in bytes of this process's group and its parents; None when there is none."""
    found = [read_int(root, f"{folder}/memory.max") for folder in _folders(root, "")]
    found += [read_int(root, f"{folder}/memory.limit_in_bytes") for folder in _folders(root, "memory")]
    limits = [limit for limit in found if limit is not None and 0 < limit < _UNLIMITED_V1]
    return min(limits, default=None)


def memory_left(root: Path) -> int | None:
    """What is left of the tightest memory limit of control groups v2, the page cache counted as free; None without a limit."""
    left = []
    for folder in _folders(root, ""):
        limit, used = (read_int(root, f"{folder}/memory.{name}") for name in ("max", "current"))
        if limit is not None and used is not None:
            cached = re.search(r"^inactive_file (\d+)$", read_text(root, f"{folder}/memory.stat") or "", re.MULTILINE)
            left.append(max(0, limit - used + (int(cached[1]) if cached else 0)))
    return min(left, default=None)


def free_memory(root: Path) -> int | None:
    """Bytes that this process could take without swapping: of the box, its control groups and its own limit (`ulimit -v`)."""
    left = [available_memory(root), memory_left(root), _address_space_left(root)]
    return min((size for size in left if size is not None), default=None)


def _address_space_left(root: Path) -> int | None:
    """Of this process's limit, by the most that it ever took."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    peak = re.search(r"^VmPeak:\s*(\d+) kB", read_text(root, "proc/self/status") or "", re.MULTILINE)
    return None if limit == resource.RLIM_INFINITY or peak is None else max(0, limit - int(peak[1]) * 1024)


def oom_kills(root: Path) -> str:
    """How many processes the kernel has killed for memory since this boot, with the boot's name; empty where it does not tell."""
    counted = re.search(r"^oom_kill (\d+)$", read_text(root, "proc/vmstat") or "", re.MULTILINE)
    boot = read_text(root, "proc/sys/kernel/random/boot_id")
    return f"{boot} {counted[1]}" if counted and boot else ""


def cpu_limit(root: Path) -> float | None:
    """The tightest CPU quota, in CPUs, of this process's group and its parents; None when there is none."""
    limits = [*_quotas_v2(root), *_quotas_v1(root)]
    return min(limits, default=None)


def _quotas_v2(root: Path) -> Iterator[float]:
    for folder in _folders(root, ""):
        quota, _, period = (read_text(root, f"{folder}/cpu.max") or "").partition(" ")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            yield int(quota) / int(period)


def _quotas_v1(root: Path) -> Iterator[float]:
    for folder in _folders(root, "cpu"):
        quota, period = (read_int(root, f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and quota > 0 and period is not None and period > 0:
            yield quota / period


def _folders(root: Path, controller: str) -> Iterator[str]:
    """The process's control group folder and its parents, relative to the root; `controller` is "" for v2."""
    mount = PurePosixPath("sys/fs/cgroup") / controller
    group = PurePosixPath("/")
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(",") and ".." not in path:
            group = PurePosixPath("/") / path
    for folder in (group, *group.parents):
        yield str(mount / folder.relative_to("/"))
