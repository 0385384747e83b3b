"""The table of known boxes: in the catalogue, in the command and in the documentation; and boards that are found in it."""

from pathlib import Path

import pytest

from devices.detect import detect, load_catalogue
from devices.profile import cpu_precisions, gpu_precisions
from tests.support.commands import data_of, run_fedcg

ROOT = Path(__file__).parents[3]
TREES = ROOT / "tests" / "golden" / "devices"


def test_the_documentation_has_the_table_of_the_catalogue() -> None:
    lines = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| name | compute capability | precisions | detected | infers | trains |") + 2
    table = lines[begin : lines.index("", begin)]
    assert table == [f"| {' | '.join(row.model_dump().values())} |" for row in load_catalogue().rows()]


def test_the_documentation_has_the_builds_for_each_board_and_jetpack_of_the_catalogue() -> None:
    catalogue = load_catalogue()
    rows = [
        f"| {catalogue.soc[one.soc].family}, {one.system} | {one.python} | {one.torch} | {one.onnxruntime} | {one.source} |"
        for one in catalogue.builds
    ]
    lines = (ROOT / "docs" / "devices.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| board | Python | torch | onnxruntime | says |") + 2
    assert lines[begin : lines.index("", begin)] == rows
    assert {one.jetpack for one in catalogue.builds} == {5, 6, 7}
    trains = {row.name.partition(":")[0]: row.trains for row in catalogue.rows()}
    assert trains["Jetson Orin"] == "yes: GPU, or CPU; from JetPack 6 (Jetson Linux 36)"
    assert {one.soc for one in catalogue.builds} == {"tegra194", "tegra234", "tegra264"}


@pytest.mark.parametrize(
    ("tree", "python"),
    [
        ("jetson-agx-xavier", "3.8"),
        ("jetson-agx-orin-jetpack5", "3.8"),
        ("jetson-orin-nano-8gb", "3.10"),
        ("jetson-agx-thor", "3.12"),
        ("jetson-nano", None),
        ("raspberrypi-5", None),
    ],
)
def test_a_board_knows_the_builds_for_its_own_jetpack(tree: str, python: str | None) -> None:
    builds = detect(TREES / tree).builds
    assert (None if builds is None else builds.python) == python
    shown = run_fedcg("profile", "--root", TREES / tree, environment={"COLUMNS": "900"}).stdout
    assert ("builds for its GPU" in shown) == (builds is not None)


def test_the_command_prints_the_same_table() -> None:
    known = data_of(run_fedcg("profile", "--known", "--json").stdout)["known"]
    assert known == [row.model_dump() for row in load_catalogue().rows()]
    shown = run_fedcg("profile", "--known", environment={"COLUMNS": "900"}).stdout
    assert all(row["name"] in shown for row in known)


@pytest.mark.parametrize(
    ("tree", "known_as", "precisions", "trains"),
    [
        ("jetson-nano", "Jetson Nano", ("f32", "f16"), False),
        ("jetson-tx2", "Jetson TX2", ("f32", "f16"), False),
        ("jetson-xavier-nx", "Jetson Xavier", ("f32", "f16", "int8"), False),
        ("jetson-orin-nano-8gb", "Jetson Orin", ("f32", "f16", "bf16", "int8"), True),
        ("jetson-agx-thor", "Jetson Thor", ("f32", "f16", "bf16", "int8"), True),
        ("raspberrypi-3", "Raspberry Pi 3", ("f32",), True),
        ("raspberrypi-4", "Raspberry Pi 4, 400", ("f32",), True),
        ("raspberrypi-5", "Raspberry Pi 5, 500", ("f32", "f16", "int8"), True),
        ("x86-laptop", None, ("f32", "int8"), True),
        ("x86-cuda", None, None, True),  # the driver's files name no compute capability
    ],
)
def test_a_board_is_found_in_the_table_with_its_precisions(
    tree: str, known_as: str | None, precisions: tuple[str, ...] | None, trains: bool
) -> None:
    profile = detect(TREES / tree)
    assert (profile.known_as, profile.precisions, profile.trainable.possible) == (known_as, precisions, trains)
    if known_as is not None:
        assert any(row.name.split(":")[0] == known_as for row in load_catalogue().rows())


def test_precisions_follow_compute_capability_and_instructions() -> None:
    capabilities = [(5, 0), (5, 3), (6, 1), (6, 2), (7, 0), (7, 5), (9, 0)]
    assert ["".join(name[0] for name in gpu_precisions(one)[1:]) for one in capabilities] == [
        "", "f", "fi", "f", "f", "fi", "fbi",
    ]  # fmt: skip
    assert cpu_precisions("fpu avx2") == ("f32",)
    assert cpu_precisions("avx512_bf16 avx512_fp16 avx512_vnni") == ("f32", "f16", "bf16", "int8")
