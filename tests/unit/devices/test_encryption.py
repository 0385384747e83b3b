"""Whether a block device is encrypted, from composed trees of sysfs as the kernel lays them out."""

import os
from pathlib import Path

import pytest

from devices.files import is_encrypted

PCI = "sys/devices/pci0000:00/0000:00:01.1/nvme/nvme0/nvme0n1"
DISK2 = "sys/devices/pci0000:00/0000:00:17.0/ata1/host0/target0:0:0/0:0:0:0/block/sda"
EMMC = "sys/devices/platform/3460000.mmc/mmc_host/mmc0/mmc0:0001/block/mmcblk0"
DM, LOOP, MD = "sys/devices/virtual/block/dm-", "sys/devices/virtual/block/loop0", "sys/devices/virtual/block/md0"
LUKS, LVM = "CRYPT-LUKS2-0f2e6f1c-fedcg", "LVM-vg0-root"
NUMBER = os.makedev(253, 1)
"""Of the device on which the store lies, in every tree."""

Node = tuple[str, str, tuple[str, ...]]
"""A device's folder, the UUID of its mapping where it is one, and the folders of the devices below it."""


def tree(root: Path, *nodes: Node) -> Path:
    """The block devices of a machine; the first is the one of the store."""
    for folder, uuid, below in nodes:
        (root / folder / "slaves").mkdir(parents=True, exist_ok=True)
        if uuid:
            (root / folder / "dm").mkdir()
            (root / folder / "dm" / "uuid").write_text(f"{uuid}\n")
        if folder.endswith(("p1", "p2", "sda1")):
            (root / folder / "partition").write_text("1\n")
        if folder == LOOP:
            (root / folder / "loop").mkdir()
        for one in below:
            (root / folder / "slaves" / Path(one).name).symlink_to(
                os.path.relpath(root / one, root / folder / "slaves")
            )
    names = root / "sys/dev/block"
    names.mkdir(parents=True)
    (names / "253:1").symlink_to(os.path.relpath(root / nodes[0][0], names))
    return root


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        pytest.param([(f"{DM}0", LUKS, (f"{PCI}/nvme0n1p2",))], True, id="LUKS on a partition"),
        pytest.param([(f"{DM}1", LVM, (f"{DM}0",)), (f"{DM}0", LUKS, (PCI,))], True, id="LVM on LUKS"),
        pytest.param(
            [(f"{PCI}/nvme0n1p1", "", ()), (PCI, "", (f"{DM}0",)), (f"{DM}0", LUKS, ())], True, id="a partition in LUKS"
        ),
        pytest.param(
            [(MD, "", (f"{DM}0", f"{DISK2}/sda1")), (f"{DM}0", LUKS, ()), (f"{DISK2}/sda1", "", ()), (DISK2, "", ())],
            False,
            id="RAID of which half is on LUKS",
        ),
        pytest.param([(f"{EMMC}/mmcblk0p1", "", ()), (EMMC, "", ())], False, id="a partition of an SD card"),
        pytest.param([(f"{DM}0", "CRYPT-VERITY-root", (PCI,)), (PCI, "", ())], False, id="dm-verity encrypts nothing"),
        pytest.param([(f"{DM}0", "CRYPT-INTEGRITY-x", (PCI,)), (PCI, "", ())], False, id="dm-integrity neither"),
        pytest.param([(f"{DM}0", LUKS, (LOOP,)), (LOOP, "", ())], True, id="LUKS in a file"),
        pytest.param([(LOOP, "", ())], None, id="a file as a disk"),
    ],
)
def test_a_device_is_encrypted_where_all_that_it_holds_goes_through_dm_crypt(
    tmp_path: Path, nodes: list[Node], expected: bool | None
) -> None:
    for folder in {below for _, _, some in nodes for below in some} - {folder for folder, _, _ in nodes}:
        (tmp_path / folder).mkdir(parents=True)
    assert is_encrypted(tree(tmp_path, *nodes), NUMBER) is expected


def test_a_device_that_linux_does_not_list_is_unknown(tmp_path: Path) -> None:
    assert is_encrypted(tree(tmp_path, (PCI, "", ())), os.makedev(0, 47)) is None
    assert is_encrypted(tmp_path / "no sysfs", NUMBER) is None
