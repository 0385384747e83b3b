"""Reads the files by which Linux describes a machine, below any root, so that a recorded tree reads like a live box.

Every reader returns None when the machine does not report it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from devices.profile import L4tRelease

_MAX_FILE_BYTES = 4 << 20


def read_text(root: Path, name: str) -> str | None:
    """Content of a file below the root, without trailing NULs and white space; None when unreadable or empty."""
    try:
        with (root / name).open("rb") as file:
            data = file.read(_MAX_FILE_BYTES)
    except (OSError, ValueError):  # ValueError: a damaged file led to a name that no file can have
        return None
    return data.decode("utf-8", "replace").strip("\0 \t\r\n") or None


def read_int(root: Path, name: str) -> int | None:
    """A file that holds one decimal number; None for anything else ("max", for one)."""
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
    """Name of the board or product: device-tree, else the firmware's tables (maker and product)."""
    board = device_tree(root, "model")
    if board is not None:
        return board
    product = read_text(root, "sys/class/dmi/id/product_name")
    if product is None:
        return None
    maker = read_text(root, "sys/class/dmi/id/sys_vendor")
    return product if maker is None or product.startswith(maker) else f"{maker} {product}"


def installed_memory(root: Path) -> int | None:
    """MemTotal of /proc/meminfo in bytes."""
    return _meminfo(root, "MemTotal")


def available_memory(root: Path) -> int | None:
    """MemAvailable of /proc/meminfo in bytes."""
    return _meminfo(root, "MemAvailable")


def _meminfo(root: Path, name: str) -> int | None:
    match = re.search(rf"^{name}:\s*(\d+) kB", read_text(root, "proc/meminfo") or "", re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def is_encrypted(root: Path, device: int) -> bool | None:
    """Whether all that a block device holds is encrypted by dm-crypt (LUKS, plain); None where it is not listed or lies in a file.

    Args:
        root: where Linux's files are.
        device: its number, the `st_dev` of a file on it.
    """
    place = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    return _is_encrypted(place.resolve()) if place.exists() else None


def _is_encrypted(device: Path) -> bool | None:
    # Verity and integrity mappings, and the integrity layer below LUKS, have names of cryptsetup too and encrypt nothing.
    if re.match("CRYPT-(?!VERITY-|INTEGRITY-|SUBDEV-)", read_text(device, "dm/uuid") or ""):
        return True
    if (device / "loop").exists():
        return None
    if (device / "partition").exists():
        return _is_encrypted(device.parent)
    below = {_is_encrypted(slave.resolve()) for slave in (device / "slaves").glob("*")}
    return None if None in below and False not in below else below == {True}


def online_cpus(root: Path) -> int | None:
    """Number of CPUs that are online, from sysfs' list ("0-3,5"), else from /proc/cpuinfo."""
    listed = read_text(root, "sys/devices/system/cpu/online")
    if listed is not None and re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", listed):
        spans = (span.partition("-") for span in listed.split(","))
        return sum(int(last or first) - int(first) + 1 for first, _, last in spans)
    return len(re.findall(r"^processor\s*:", read_text(root, "proc/cpuinfo") or "", re.MULTILINE)) or None
