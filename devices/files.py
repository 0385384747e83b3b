"""Reads the files in which Linux describes a machine, and the control groups (v2 and v1) that limit this process's memory and CPUs.

Files are read below any root, so a recorded tree works like a live machine. Readers return None if the machine does not report a value.
"""

import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from devices.profile import L4tRelease

LIVE_ROOT = Path("/")
_MAX_FILE_BYTES = 4 << 20


def read_text(root: Path, name: str) -> str | None:
    """Content of a file below the root, without trailing NULs and white space; None if unreadable or empty."""
    try:
        with (root / name).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except (OSError, ValueError):  # ValueError: an impossible file name from a damaged file
        return None
    return data.decode("utf-8", "replace").strip("\0 \t\r\n") or None


def read_int(root: Path, name: str) -> int | None:
    """The decimal number in a file; None for other content, e.g. "max"."""
    text = read_text(root, name)
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def device_tree(root: Path, name: str) -> str | None:
    """A property of the root node of the device-tree."""
    return read_text(root, f"proc/device-tree/{name}") or read_text(root, f"sys/firmware/devicetree/base/{name}")


def compatible(root: Path) -> tuple[str, ...]:
    """The device-tree's `compatible` list, most specific first; empty without a device-tree."""
    text = device_tree(root, "compatible")
    return tuple(entry for entry in text.split("\0") if entry) if text else ()


def l4t_release(root: Path) -> L4tRelease | None:
    """Release of Jetson Linux from /etc/nv_tegra_release."""
    text = read_text(root, "etc/nv_tegra_release")
    match = re.match(r"#\s*R(\d+)\s*\(release\),\s*REVISION:\s*([0-9.]+)", text) if text else None
    return L4tRelease(int(match[1]), match[2]) if match else None


def cpuinfo_field(root: Path, name: str) -> str | None:
    """The first value of a field of /proc/cpuinfo."""
    match = re.search(rf"^{re.escape(name)}\s*:\s*(\S.*)$", read_text(root, "proc/cpuinfo") or "", re.MULTILINE)
    return match[1].strip() if match else None


def architecture(root: Path) -> str | None:
    """The machine's architecture as `uname -m` names it."""
    reported = read_text(root, "proc/sys/kernel/arch")
    if reported is not None:
        return reported
    if cpuinfo_field(root, "CPU architecture") == "8":
        return "aarch64"
    flags = cpuinfo_field(root, "flags")
    return "x86_64" if flags is not None and "lm" in flags.split() else None


def machine_model(root: Path) -> str | None:
    """Name of the board or product, from the device-tree or else from the firmware's tables (maker and product)."""
    board = device_tree(root, "model")
    if board is not None:
        return board
    product = read_text(root, "sys/class/dmi/id/product_name")
    if product is None:
        return None
    maker = read_text(root, "sys/class/dmi/id/sys_vendor")
    return product if maker is None or product.startswith(maker) else f"{maker} {product}"


def meminfo(root: Path, name: str) -> int | None:
    """A field of /proc/meminfo, such as MemTotal, in bytes."""
    match = re.search(rf"^{name}:\s*(\d+) kB", read_text(root, "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def is_encrypted(root: Path, device: int) -> bool | None:
    """Whether a block device is fully encrypted with dm-crypt (LUKS, plain); None if it is not listed or is stored in a file.

    Args:
        root: of Linux's files.
        device: its number, the `st_dev` of a file on it.
    """
    place = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    return _is_encrypted(place.resolve()) if place.exists() else None


def _is_encrypted(device: Path) -> bool | None:
    # Verity and integrity mappings, and the integrity layer below LUKS, also have cryptsetup names, but don't encrypt.
    if re.match("CRYPT-(?!VERITY-|INTEGRITY-|SUBDEV-)", read_text(device, "dm/uuid") or ""):
        return True
    if (device / "loop").exists():
        return None
    if (device / "partition").exists():
        return _is_encrypted(device.parent)
    below = {_is_encrypted(slave.resolve()) for slave in (device / "slaves").glob("*")}
    return None if None in below and False not in below else below == {True}


def online_cpus(root: Path) -> int | None:
    """Number of online CPUs, from sysfs' list ("0-3,5") or else from /proc/cpuinfo."""
    listed = read_text(root, "sys/devices/system/cpu/online")
    if listed is not None and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        spans = (span.partition("-") for span in listed.split(","))
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    return len(re.findall(r"^processor\s*:", read_text(root, "proc/cpuinfo") or "", re.MULTILINE)) or None


# Without a limit, v1 reports the largest page-aligned 63-bit number instead of a word.
_UNLIMITED_V1 = 1 << 60


def memory_limit(root: Path) -> int | None:
    """The lowest memory limit in bytes of this process's group and its parents; None without a limit."""
    found = [read_int(root, f"{folder}/memory.max") for folder in _folders(root, "")]
    found += [read_int(root, f"{folder}/memory.limit_in_bytes") for folder in _folders(root, "memory")]
    limits = [limit for limit in found if limit is not None and 0 < limit < _UNLIMITED_V1]
    return min(limits, default=None)


def memory_left(root: Path) -> int | None:
    """Available bytes within the tightest memory limit of control groups v2, counting page cache as free; None without a limit."""
    left = []
    for folder in _folders(root, ""):
        limit, used = (read_int(root, f"{folder}/memory.{name}") for name in ("max", "current"))
        if limit is not None and used is not None:
            cached = re.search(r"^inactive_file (\d+)$", read_text(root, f"{folder}/memory.stat") or "", re.MULTILINE)
            left.append(max(0, limit - used + (int(cached[1]) if cached else 0)))
    return min(left, default=None)


def free_memory(root: Path) -> int | None:
    """Bytes that this process can allocate without swapping, within the system, its control groups and its own limit (`ulimit -v`)."""
    return least(meminfo(root, "MemAvailable"), memory_left(root), _address_space_left(root))


def least(*values: int | None) -> int | None:
    """The smallest of the known values; None without any."""
    return min((value for value in values if value is not None), default=None)


def _address_space_left(root: Path) -> int | None:
    """Bytes left of this process's address-space limit, based on its peak usage."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    peak = re.search(r"^VmPeak:\s*(\d+) kB", read_text(root, "proc/self/status") or "", re.MULTILINE)
    return None if limit == resource.RLIM_INFINITY or peak is None else max(0, limit - int(peak[1]) * 1024)


def oom_kills(root: Path) -> str:
    """The boot's id and the number of processes that the kernel has killed for memory since then; empty if not reported."""
    counted = re.search(r"^oom_kill (\d+)$", read_text(root, "proc/vmstat") or "", re.MULTILINE)
    boot = read_text(root, "proc/sys/kernel/random/boot_id")
    return f"{boot} {counted[1]}" if counted and boot else ""


def cpu_limit(root: Path) -> float | None:
    """The lowest CPU quota, in CPUs, of this process's group and its parents; None without a quota."""
    return min([*_quotas_v2(root), *_quotas_v1(root)], default=None)


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
    """The process's control group folder and its parents, relative to the root. `controller` is "" for v2."""
    mount = PurePosixPath("sys/fs/cgroup") / controller
    group = PurePosixPath("/")
    for line in (read_text(root, "proc/self/cgroup") or "").splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(",") and ".." not in path:
            group = PurePosixPath("/") / path
    for folder in (group, *group.parents):
        yield str(mount / folder.relative_to("/"))
