"""`[data] defence` on a device: defended training images, a snapshot that names it, progress, a doctor that shows where samples lie."""

import logging
import re
import stat
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.cli.doctor.checks import examine
from edge_client.config import DataSection
from edge_client.store.generations import Snapshot
from edge_client.training.local_data import LocalData, LocalDefence
from fedcg.event_log import EventLog
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.method import silent
from fedcg.learning.seeds import Streams
from fedcg.sentences import sentence_of
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.edge.training_site import DEVICE_KEY, Site, real_spec
from tests.support.edge.world import CLASSES, FEDERATION

SHORT: dict[str, int | str] = {
    "gan_steps": 4,
    "obfuscation_steps": 2,
    "width": 4,
    "batch_size": 6,
    "checkpoint_every": 2,
    "features": "gabor",
}


def give(site: Site, defence: str = "antigan", params: Mapping[str, int | str] = SHORT) -> None:
    values = {**site.config.data.model_dump(), "defence": defence, "defence_params": params}
    site.configure(data=DataSection.model_validate(values))


def local(site: Site) -> LocalData:
    defence = LocalDefence(site.config.data, site.store, EventLog(site.events_path, lambda: 0.0))
    return LocalData(site.config.data.root, None, site.store, defence=defence)


def finding(site: Site) -> tuple[str, str]:
    (found,) = examine(site.config, datetime.now(timezone.utc), ["defence"])
    return found.state, found.detail


def test_a_round_trains_on_defended_images_and_its_snapshot_and_doctor_say_so(tmp_path: Path) -> None:
    plain, site = Site(tmp_path / "plain", real_spec("local")), Site(tmp_path / "defended", real_spec("local"))
    give(site)
    assert finding(plain) == ("ok", "none: models are trained on the real images")
    assert "will be in" in finding(site)[1]
    plain.train()
    site.train()

    snapshot = site.store.generations.snapshot(site.state().generation)
    real = site.data()
    defence, params = defence_of("antigan", SHORT)
    place = DefencePlace(Streams(DEVICE_KEY).at(FEDERATION, "defence"), lambda *_: None)
    expected = defence.apply(real.train, params, place).images
    assert snapshot.files == real.snapshot.files
    assert snapshot.defence.startswith("antigan-gan_steps=4")
    assert snapshot.defended == expected.digest()
    assert Snapshot.decode(snapshot.encode()) == snapshot
    own, others = (one.state().slots["personal"] for one in (site, plain))
    assert any(not np.array_equal(own[part][name], others[part][name]) for part in own for name in own[part])

    (event,) = site.events("defended")
    assert event["count"] == len(real.train)
    assert re.fullmatch(r"features gabor, spread 0\.\d\d, classes_of_one_image 0", str(event["detail"]))
    assert [one["step"] for one in site.events("progress") if one["phase"] == "defence"][-1] == 6
    samples = Path(str(event["samples"]))
    assert finding(site)[0] == "ok"
    assert str(samples) in finding(site)[1]
    assert samples.is_relative_to(site.store.root)
    assert stat.S_IMODE(samples.stat().st_mode) == 0o600
    assert stat.S_IMODE(samples.parent.stat().st_mode) == 0o700
    assert np.array(Image.open(samples)).shape[:2] == (96 * len(CLASSES), 288)


def test_it_is_trained_once_and_validation_and_test_stay_real(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    real = site.data()
    give(site)
    steps: list[int] = []
    mine = local(site)
    first = mine.for_round(site.spec, 1, lambda phase, step, of: steps.append(step))
    assert steps == [1, 2, 3, 4, 5, 6]
    assert mine.for_round(site.spec, 1) is first
    again = local(site).for_round(site.spec, 2, lambda phase, step, of: steps.append(step))
    assert len(steps) == 6
    assert torch.equal(again.train.images, first.train.images)
    assert torch.equal(first.val.images, real.val.images)
    assert torch.equal(first.test.images, real.test.images)
    assert torch.equal(first.train.labels, real.train.labels)
    assert bool((first.train.images != real.train.images).flatten(1).any(dim=1).all())


def test_an_image_that_is_added_later_changes_nothing_of_the_others(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site)
    first = local(site).for_round(site.spec, 1)
    folder = tmp_path / "data" / "train" / CLASSES[0]
    for number in range(8):  # some go to the validation images
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"zz{number}.png")
    grown = local(site).for_round(site.spec, 2)
    assert len(grown.train) > len(first.train)
    known = {image.numpy().tobytes() for image in grown.train.images}
    assert all(image.numpy().tobytes() in known for image in first.train.images)


def test_training_that_was_killed_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    whole, site = Site(tmp_path / "whole", real_spec("local")), Site(tmp_path / "killed", real_spec("local"))
    give(whole)
    give(site)

    def killed(phase: str, step: int, of: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        local(site).for_round(site.spec, 1, killed)
    steps: list[int] = []
    made = local(site).for_round(site.spec, 1, lambda phase, step, of: steps.append(step))
    assert steps == [5, 6]
    assert made.snapshot == local(whole).for_round(whole.spec, 1).snapshot


def test_a_class_with_one_image_is_a_warning_in_the_log(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site)
    images = site.data().train
    (of_first,) = torch.nonzero(images.labels == 0, as_tuple=True)
    few = images.rows([*of_first[:1].tolist(), *torch.nonzero(images.labels).flatten().tolist()])
    LocalDefence(site.config.data, site.store, EventLog(site.events_path, lambda: 0.0)).apply(FEDERATION, few, silent)
    (event,) = site.events("defence_warning")
    assert "1 of 3 classes here have a single training image" in str(event["detail"])
    sentence = sentence_of(event)
    assert sentence is not None
    assert sentence.level == logging.WARNING
    assert "the GAN knows no more than that image" in sentence.text


def test_a_window_larger_than_the_images_declines_with_the_setting_to_change(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site, params={"window": 33})
    report = site.declined()
    assert report.reason is DeclineReason.SPEC_REFUSED
    assert "window = 33 is larger than the images of 32x32 pixels: lower `window`" in report.detail


def test_the_doctor_names_a_file_of_weights_that_is_not_there(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site)
    site.configure(data={"defence_stem": tmp_path / "gone.pth"})
    state, detail = finding(site)
    assert state == "failed"
    assert detail.startswith("antigan-")
    assert detail.endswith(f"defence_stem {tmp_path / 'gone.pth'} is no file")
