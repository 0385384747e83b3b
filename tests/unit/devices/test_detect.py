"""What box this is, from recorded and composed file trees and this machine; and the table of known boxes."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pynvml
import pytest

from devices import detect as detection
from devices.detect import detect, load_catalogue, runtime_obstacle
from devices.nvidia import nvml_gpu
from devices.profile import GIB, DeviceKind, Gpu
from tests.support.present import present
from tests.support.raising import raising

ROOT = Path(__file__).parents[3]
TREES = ROOT / "tests" / "golden" / "devices"
KIB = 1024


@pytest.mark.parametrize(
    ("tree", "module", "capability", "cpus", "memory_kib", "release"),
    [
        ("jetson-orin-nano-8gb", "Jetson Orin Nano 8GB (developer kit)", (8, 7), 6, 7802392, "36.4.7"),
        ("jetson-agx-thor", "Jetson T5000 (Thor)", (11, 0), 14, 128825804, "38.2.0"),
        ("jetson-agx-orin-jetpack5", "Jetson AGX Orin 64GB", (8, 7), 8, 64336820, "35.4.1"),
        ("jetson-xavier-nx", "Jetson Xavier NX (developer kit)", (7, 2), 6, 7078648, "35.4.1"),
        ("jetson-nano", "Jetson Nano (developer kit)", (5, 3), 4, 4059340, "32.7.1"),
    ],
)
def test_a_jetson_is_known_by_its_device_tree(
    tree: str, module: str, capability: tuple[int, int], cpus: int, memory_kib: int, release: str
) -> None:
    profile = detect(TREES / tree)
    assert profile.kind is DeviceKind.JETSON
    assert module in present(profile.model)
    assert (profile.architecture, profile.cpus, profile.memory_bytes) == ("aarch64", cpus, memory_kib * KIB)
    gpu = present(profile.gpu)
    assert gpu.shares_memory
    assert (gpu.memory_bytes, gpu.compute_capability) == (profile.memory_bytes, capability)
    assert str(profile.l4t) == release


@pytest.mark.parametrize(
    ("tree", "known_as", "trains", "why"),
    [
        ("jetson-nano", "Jetson Nano", False, "ONNX"),
        ("jetson-tx2", "Jetson TX2", False, "ONNX"),
        ("jetson-xavier-nx", "Jetson Xavier", False, "ONNX"),
        ("jetson-agx-orin-jetpack5", "Jetson Orin", False, "JetPack 6"),
        ("jetson-orin-nano-8gb", "Jetson Orin", True, "GPU"),
        ("jetson-agx-thor", "Jetson Thor", True, "GPU"),
        ("raspberrypi-3", "Raspberry Pi 3", True, "CPU"),
        ("raspberrypi-4", "Raspberry Pi 4, 400", True, "CPU"),
        ("raspberrypi-5", "Raspberry Pi 5, 500", True, "CPU"),
        ("x86-laptop", None, True, "CPU"),
        ("x86-cuda", None, True, "RTX A2000"),  # the driver's files name no compute capability
        ("service-cgroup-v1", None, False, "512 MiB"),
    ],
)
def test_a_board_is_found_in_the_table_and_why_it_can_train_or_not(
    tree: str, known_as: str | None, trains: bool, why: str
) -> None:
    profile = detect(TREES / tree)
    assert (profile.known_as, profile.trainable.possible) == (known_as, trains)
    assert why in profile.trainable.reason


def test_a_cuda_box_without_nvml_is_known_by_the_drivers_files_and_the_rest_is_unavailable() -> None:
    profile = detect(TREES / "x86-cuda")
    assert (profile.kind, profile.model) == (DeviceKind.CUDA, "Dell Inc. Precision 3660")
    assert profile.architecture == "x86_64"
    assert profile.gpu == Gpu("NVIDIA RTX A2000 12GB", memory_bytes=None, compute_capability=None, driver="535.183.01")


def test_a_recorded_virtual_machine_is_a_cpu_box_and_this_machine_reports_its_memory_and_processor() -> None:
    profile, live = detect(TREES / "x86-cpu"), detect()
    assert (profile.kind, profile.cpus, profile.architecture) == (DeviceKind.CPU, 2, "x86_64")
    assert (profile.cpu_model, profile.gpu, profile.l4t) == ("AMD EPYC", None, None)
    assert all((live.memory_bytes, live.cpus, live.architecture))


@pytest.mark.parametrize(
    ("tree", "mib", "cpus"),
    [
        ("container-cgroup-v2", 1536, 2),  # a quota of 2.5 CPUs
        ("service-cgroup-v1", 512, 1),  # the slice is tighter than the service; a quota of 1.5 CPUs
    ],
)
def test_the_tightest_limit_of_control_groups_bounds_memory_and_cpus(tree: str, mib: int, cpus: int) -> None:
    profile = detect(TREES / tree)
    assert (profile.memory_bytes, profile.cpus) == (mib * KIB * KIB, cpus)


def test_what_is_missing_or_damaged_is_unavailable_and_never_zero_or_an_error(tmp_path: Path) -> None:
    root = Path(shutil.copytree(TREES / "container-cgroup-v2", tmp_path / "box"))
    for file in root.rglob("*"):
        if file.is_file():
            file.write_bytes(b"\xff\xfe::garbage\0-1 0,,-")
    (empty := tmp_path / "empty").mkdir()
    for box in (detect(root), detect(empty)):
        assert (box.cpus, box.memory_bytes, box.gpu, box.l4t) == (None,) * 4
    assert (detect(empty).kind, detect(empty).model, detect(empty).architecture) == (DeviceKind.CPU, None, None)


def test_an_unknown_module_of_a_known_chip_still_gives_the_generation(tmp_path: Path) -> None:
    tree = tmp_path / "proc" / "device-tree"
    tree.mkdir(parents=True)
    (tree / "compatible").write_bytes(b"acme,carrier-1\0nvidia,p9999-0001\0nvidia,tegra234\0")
    (tree / "model").write_bytes(b"Acme Box\0")
    profile = detect(tmp_path)
    assert (profile.kind, profile.model) == (DeviceKind.JETSON, "Acme Box")
    gpu = present(profile.gpu)
    assert (gpu.compute_capability, gpu.memory_bytes) == ((8, 7), None)


def test_a_recorded_tree_is_never_mixed_with_the_gpu_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("devices.detect.nvml_gpu", lambda: Gpu("NVIDIA H200", 141 * GIB, (9, 0), "570"))
    assert detect(TREES / "x86-cpu").gpu is None
    assert present(detect().gpu).name == "NVIDIA H200"


def test_what_the_driver_tells_of_a_jetson_wins_and_the_catalogue_completes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "LIVE_ROOT", TREES / "jetson-agx-thor")
    monkeypatch.setattr(detection, "nvml_gpu", lambda: Gpu("NVIDIA Thor", None, None, "580.00"))
    profile = detect(TREES / "jetson-agx-thor")
    gpu = present(profile.gpu)
    assert (gpu.name, gpu.driver) == ("NVIDIA Thor", "580.00")
    assert (gpu.compute_capability, gpu.memory_bytes) == ((11, 0), profile.memory_bytes)


def test_a_machine_without_the_nvml_library_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynvml, "nvmlInit", raising(pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)))
    assert nvml_gpu() is None


def test_nvml_fills_the_profile_and_what_it_does_not_support_stays_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    fakes = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: closed.append(True),
        "nvmlDeviceGetHandleByIndex": lambda index: SimpleNamespace(index=index),
        "nvmlDeviceGetName": lambda _handle: "NVIDIA RTX 4000",
        "nvmlDeviceGetMemoryInfo": raising(pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)),
        "nvmlDeviceGetCudaComputeCapability": lambda _handle: (8, 9),
        "nvmlSystemGetDriverVersion": lambda: "550.54",
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(pynvml, name, fake)
    assert nvml_gpu() == Gpu("NVIDIA RTX 4000", memory_bytes=None, compute_capability=(8, 9), driver="550.54")
    assert closed == [True]


def test_every_module_of_the_catalogue_is_found_by_its_part_number_and_chip() -> None:
    catalogue = load_catalogue()
    for number, module in catalogue.module.items():
        found = catalogue.identify((f"nvidia,p1111-0000+{number}", f"nvidia,{module.soc}"))
        assert present(found).module == module


@pytest.mark.parametrize("tree", ["jetson-nano", "jetson-agx-xavier", "jetson-agx-orin-jetpack5"])
def test_an_old_board_is_refused_by_the_python_that_is_there_and_not_by_its_age(
    tree: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = Path(shutil.copytree(TREES / tree, tmp_path / "box"))
    assert not detect(root).trainable.possible  # of a recorded box that of its last JetPack counts
    monkeypatch.setattr(detection, "LIVE_ROOT", root)  # the box itself, where this Python runs
    monkeypatch.setattr(detection, "nvml_gpu", lambda: None)
    assert detect(root).trainable.possible


@pytest.mark.parametrize(
    ("tree", "told"),
    [
        ("x86-cuda", "pip install 'fedcg-edge[infer-gpu]'"),
        ("jetson-orin-nano-8gb", "onnxruntime-gpu 1.22.0 from pypi.jetson-ai-lab.io/jp6/cu126"),
        ("jetson-agx-thor", "the build for this board and JetPack: unknown"),
        ("jetson-agx-orin-jetpack5", "the build for this board and JetPack: unknown"),
        ("x86-cpu", None),
        ("raspberrypi-5", None),
    ],
)
def test_a_gpu_beside_an_onnxruntime_for_the_cpu_is_told_with_the_build_to_install(
    tree: str, told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = runtime_obstacle(detect(TREES / tree))  # with the onnxruntime that is installed here, which has no CUDA
    assert (found == "") if told is None else (told in found)
    assert told is None or "this device has a GPU" in found
    monkeypatch.setattr(
        onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
    )
    assert runtime_obstacle(detect(TREES / tree)) == ""


def test_the_documentation_has_every_jetson_of_the_catalogue_and_every_other_kind() -> None:
    lines = (ROOT / "docs" / "reference/hardware.md").read_text(encoding="utf-8").splitlines()
    catalogue = load_catalogue()
    for key, soc in catalogue.soc.items():
        modules = [one.name.removeprefix("Jetson ") for one in catalogue.module.values() if one.soc == key]
        capability = ".".join(map(str, soc.compute_capability))
        row = next(
            line for line in lines if line.startswith(f"| Jetson {soc.family}: {', '.join(modules)} | {capability} |")
        )
        assert row.endswith("| no: Python is too old |") != soc.can_train
    assert all(any(line.startswith(f"| {kind.name} |") for line in lines) for kind in catalogue.kind)


def test_the_documentation_has_the_builds_for_each_board_and_jetpack_of_the_catalogue() -> None:
    catalogue = load_catalogue()
    rows = [
        f"| {catalogue.soc[one.soc].family}, {one.system} | {one.python} | {one.torch} | {one.onnxruntime} | {one.source} |"
        for one in catalogue.builds
    ]
    lines = (ROOT / "docs" / "reference/hardware.md").read_text(encoding="utf-8").splitlines()
    begin = lines.index("| board | Python | torch | onnxruntime | says |") + 2
    assert lines[begin : lines.index("", begin)] == rows
