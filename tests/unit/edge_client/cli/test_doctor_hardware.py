"""`fedcg doctor --hardware`: the device, its readings, and whether they let it train."""

from pathlib import Path
from typing import Any

import pytest

from devices.eligibility import EligibilitySettings
from edge_client.cli.doctor.checks import Finding
from edge_client.cli.doctor.hardware import examine_hardware
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.world import write_device

TREES = Path(__file__).parents[3] / "golden" / "devices"


def find(tree: Path | str, store: Path, **settings: Any) -> dict[str, list[Finding]]:
    found: dict[str, list[Finding]] = {}
    for finding in examine_hardware(EligibilitySettings(**settings), store, TREES / tree, lambda seconds: None):
        found.setdefault(finding.check, []).append(finding)
    return found


def test_an_orin_shows_every_reading_and_nothing_keeps_it_from_training(tmp_path: Path) -> None:
    found = find("jetson-orin-nano-8gb", tmp_path)
    assert "known as Jetson Orin" in found["device"][0].detail
    assert "compute capability 8.7" in found["GPU"][0].detail
    assert found["training"][0].detail.startswith("cuda, 2 threads, 100% of the batch")
    assert "torch 2.6.0rc1 or 2.7 from" in found["builds for its GPU"][0].detail
    assert [finding.detail for finding in found["power"]] == [
        "VDD_IN 5.61 W",
        "VDD_CPU_GPU_CV 2.02 W",
        "VDD_SOC 1.45 W",
    ]
    assert "tj-thermal 53 °C" in found["temperature"][2].detail
    assert "critical 104" in found["temperature"][2].detail
    assert "over-current oc3: 41 since the start" in found["throttling"][0].detail
    assert found["supply"][0].detail == "unavailable, no battery"
    assert {finding.state for each in found.values() for finding in each} == {"ok"}


@pytest.mark.parametrize(
    ("tree", "settings", "check", "state", "words"),
    [
        ("jetson-nano", {}, "training", "failed", "can't train because Jetson Nano"),
        ("jetson-xavier-nx", {}, "temperature", "failed", "can't train because it is hot"),
        ("raspberrypi-3", {}, "throttling", "warning", "soft temperature limit"),
        ("raspberrypi-4", {}, "throttling", "failed", "can't train because under-voltage"),
        ("x86-laptop", {"on_mains": True}, "supply", "failed", "can't train because no mains power"),
        ("x86-laptop", {"unmetered": True}, "links", "failed", "wwan0"),
        ("x86-laptop", {"min_free_memory_mb": 10_000}, "memory", "failed", "needs 10000 MB"),
        ("raspberrypi-5", {"quiet_hours": ["00:00-12:00", "12:00-00:00"]}, "quiet hours", "failed", "can't train"),
        ("raspberrypi-5", {"stop_file": "/proc/self/stat"}, "application", "failed", "/proc/self/stat exists"),
        ("raspberrypi-5", {"min_free_disk_mb": 1 << 24}, "disk", "failed", "of disk free"),
    ],
)
def test_each_line_has_its_verdict_and_what_to_do(
    tmp_path: Path, tree: str, settings: dict[str, Any], check: str, state: str, words: str
) -> None:
    (finding,) = find(tree, tmp_path, **settings)[check]
    assert (finding.state, words in finding.detail) == (state, True)
    assert finding.advice


def test_the_command_shows_this_box_with_the_settings_of_its_agent_and_without_one(tmp_path: Path) -> None:
    alone = run_fedcg("doctor", "--hardware", "--config", str(tmp_path / "none.toml"), "--json")
    assert {"device", "memory", "disk", "links"} <= {one["check"] for one in data_of(alone.stdout)["findings"]}
    config = write_device(tmp_path / "device")
    stop = config.parent / "stop"
    config.write_text(f'{config.read_text()}[eligibility]\nstop_file = "stop"\n')
    stop.touch()
    result = run_fedcg("doctor", "--hardware", "--config", str(config))
    assert result.exit_code == 1
    assert f"{stop} exists" in result.stdout
    assert "and removes its stop_file when it is done" in result.stdout
    assert "broker" not in result.stdout
    told = run_fedcg("doctor", "--config", str(config), "--json")
    findings = {one["check"]: one for one in data_of(told.stdout)["findings"]}
    assert findings["training"] == findings["training"] | {"state": "warning", "detail": f"not now: {stop} exists"}
