"""`fedcg doctor --samples`: real images beside defended ones before the first round, or how long a defence trains first."""

import re
import stat
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.config import DataSection
from edge_client.training.local_data import LocalData, LocalDefence
from fedcg.event_log import EventLog
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import CLASSES, draw_images, write_device

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
    assert "which is assumed: the agent has no federation's spec yet" in found["detail"]
    assert found["detail"].endswith(str(picture))
    pixels = np.array(Image.open(picture))
    assert pixels.shape == (96 * len(CLASSES), 2 * 96, 3)
    assert not np.array_equal(pixels[:, :96], pixels[:, 96:])
    assert stat.S_IMODE(picture.stat().st_mode) == 0o600
    assert not (tmp_path / "box" / "store").exists()


def test_with_a_spec_and_a_secret_the_picture_is_what_the_first_round_trains_on(tmp_path: Path) -> None:
    site = Site(tmp_path / "site", real_spec("local"))
    data = site.config.data.model_copy(update={"defence": "etc"})
    config = write_config(tmp_path / "box", data.root, "etc")
    text = config.read_text()
    config.write_text(f'store = "{site.store.root}"\n{text}')
    before = {path: path.stat().st_mtime_ns for path in site.store.root.rglob("*")}
    found = shown(config, tmp_path / "seen.png")
    assert "(private; images of 32x32 pixels): " in found["detail"]
    assert {path: path.stat().st_mtime_ns for path in site.store.root.rglob("*")} == before
    local = LocalData(
        data.root,
        None,
        site.store,
        defence=LocalDefence(
            DataSection.model_validate(data.model_dump()), site.store, EventLog(site.events_path, lambda: 0.0)
        ),
    )
    layer = local.input_layer(site.spec)
    assert layer is not None
    pixels = torch.from_numpy(np.array(Image.open(tmp_path / "seen.png"))[::3, ::3])
    for line in pixels.split(32):
        real, encrypted = line[:, :32], line[:, 32:]
        assert torch.equal(layer.encrypt(real[None, None])[0, 0], encrypted)


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
        r"the first round trains it, which takes about \d+ s here \(images of 32x32 pixels\)", found["detail"]
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
    odd = write_config(tmp_path / "odd", tmp_path / "images", "etc", block=5)
    found = shown(odd, picture)
    assert found["state"] == "failed"
    assert "block = 5 does not divide images of 96x96 pixels" in found["detail"]
    assert "is assumed: the agent has no federation's spec yet" in found["detail"]
    alone = write_config(tmp_path / "alone", tmp_path / "images", "etc", key="cohort")
    assert "key = cohort needs the cohort secret" in shown(alone, picture)["detail"]
    assert not picture.exists()
