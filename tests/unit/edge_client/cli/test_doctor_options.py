"""`fedcg doctor --hardware` (the box, its readings, whether they let it train) and `--samples` (real images beside defended ones)."""

import re
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from devices.eligibility import EligibilitySettings
from edge_client.cli.doctor.checks import Finding
from edge_client.cli.doctor.hardware import examine_hardware
from edge_client.config import DataSection
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES, draw_images, write_device

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
    assert found["power mode"][0].detail == "25W"
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
        ("raspberrypi-5", {"power_modes": ["15W"]}, "power mode", "warning", "unavailable"),
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
    assert "and releases its lock_file or stop_file when it is done" in result.stdout
    assert "broker" not in result.stdout
    told = run_fedcg("doctor", "--config", str(config), "--json")
    findings = {one["check"]: one for one in data_of(told.stdout)["findings"]}
    assert findings["training"] == findings["training"] | {"state": "warning", "detail": f"not now: {stop} exists"}


GAN: dict[str, int | str] = {"gan_steps": 3, "obfuscation_steps": 2, "width": 4, "batch_size": 6, "features": "gabor"}


def write_config(folder: Path, data: Path, defence: str | None, **params: object) -> Path:
    config = write_device(folder)
    lines = "" if defence is None else f'defence = "{defence}"\n'
    table = "".join(f"{key} = {value!r}\n" for key, value in params.items()).replace("'", '"')
    text = config.read_text().replace('root = "data"\n', f'root = "{data}"\n{lines}[data.defence_params]\n{table}')
    config.write_text(text)
    return config


def shown(config: Path, picture: Path) -> dict[str, str]:
    done = run_fedcg("doctor", "--config", config, "--samples", picture, "--json")
    found: list[dict[str, str]] = data_of(done.stdout)["findings"]
    (finding,) = (one for one in found if one["check"] == "samples")
    return finding


@pytest.mark.parametrize("defence", ["ats", "etc"])
def test_before_the_agent_was_ever_started_pictures_are_made_and_nothing_else(tmp_path: Path, defence: str) -> None:
    draw_images(tmp_path / "images", 3, seed=1)
    config, picture = write_config(tmp_path / "box", tmp_path / "images", defence), tmp_path / "seen.png"
    found = shown(config, picture)
    assert found["state"] == "ok"
    assert "(assumed, because the agent has no federation spec yet)" in found["detail"]
    assert found["detail"].endswith(str(picture))
    pixels = np.array(Image.open(picture))
    assert pixels.shape == (96 * len(CLASSES), 2 * 96, 3)
    assert not np.array_equal(pixels[:, :96], pixels[:, 96:])
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600
    assert not (tmp_path / "box" / "store").exists()


def test_antigan_before_its_training_is_told_with_its_time_and_afterwards_shown(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", real_spec("local"))
    values = {**site.config.data.model_dump(), "defence": "antigan", "defence_params": GAN}
    site.configure(data=DataSection.model_validate(values))
    config = write_config(tmp_path / "box", site.config.data.root, "antigan", **GAN)
    config.write_text(f'store = "{site.store.root}"\n{config.read_text()}')
    picture = tmp_path / "seen.png"
    found = shown(config, picture)
    assert found["state"] == "ok"
    assert re.search(
        r"the first round trains it, in about \d+ s on this device \(images of 32x32 pixels\)", found["detail"]
    )
    assert not picture.exists()
    site.train()
    assert shown(config, picture)["detail"].endswith(str(picture))
    assert np.array(Image.open(picture)).shape == (96 * len(CLASSES), 3 * 96)


def test_without_a_defence_or_with_one_that_the_images_do_not_allow_no_picture_is_made(tmp_path: Path) -> None:
    draw_images(tmp_path / "images", 3, seed=1)
    picture = tmp_path / "seen.png"
    plain = write_config(tmp_path / "plain", tmp_path / "images", None)
    assert shown(plain, picture)["detail"] == "none: models are trained on the real images"
    found = shown(write_config(tmp_path / "odd", tmp_path / "images", "etc", block=5), picture)
    assert found["state"] == "failed"
    assert "block = 5 does not divide images of 96x96 pixels" in found["detail"]
    assert "(assumed, because the agent has no federation spec yet)" in found["detail"]
    alone = write_config(tmp_path / "alone", tmp_path / "images", "etc", key="cohort")
    assert "key = cohort needs the cohort secret" in shown(alone, picture)["detail"]
    assert not picture.exists()
