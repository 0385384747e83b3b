"""`[data] defence` on a device: defended training images, and encrypted ones with an exported model that encrypts plain images itself."""

import re
import stat
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.config import DataSection
from edge_client.session.signals import RoundCommitted
from edge_client.store.generations import Snapshot
from edge_client.training.local_data import LocalData, LocalDefence
from export.model.manifest import read_manifest
from export.model.versions import ModelVersions
from fedcg.event_log import EventLog
from fedcg.files import checked_secret
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.training_site import DEVICE_KEY, Site, real_spec
from tests.support.edge.world import CLASSES, FEDERATION
from tests.support.learning.networks import DIGITS, digit_images
from tests.support.present import present

SHORT: dict[str, int | str] = {
    "gan_steps": 4,
    "obfuscation_steps": 2,
    "width": 4,
    "batch_size": 6,
    "checkpoint_every": 2,
    "features": "gabor",
}


def give(site: Site, defence: str = "antigan", params: Mapping[str, int | str] | None = None, **places: Path) -> None:
    known = SHORT if defence == "antigan" and params is None else params or {}
    data = {**site.config.data.model_dump(), "defence": defence, "defence_params": known, **places}
    site.configure(data=DataSection.model_validate(data))


def local(site: Site) -> LocalData:
    defence = LocalDefence(site.config.data, site.store, EventLog(site.events_path, lambda: 0.0))
    return LocalData(site.config.data.root, site.config.data.common_test, site.store, defence=defence)


def finding(site: Site) -> tuple[str, str]:
    found = site.finding("defence")
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
    assert site.weights() != plain.weights()

    (event,) = site.events("defended")
    assert event["count"] == len(real.train)
    assert re.fullmatch(
        r"features gabor, spread 0\.\d+, real_spread 0\.\d+, classes_of_one_image 0", str(event["detail"])
    )
    assert [one["step"] for one in site.events("progress") if one["phase"] == "defence"][-1] == 6
    samples = Path(str(event["samples"]))
    assert finding(site)[0] == "ok"
    assert str(samples) in finding(site)[1]
    assert samples.is_relative_to(site.store.root)
    assert (stat.S_IMODE(samples.stat().st_mode), stat.S_IMODE(samples.parent.stat().st_mode)) == (0o600, 0o700)
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


FORM = ImageForm(mode="L", height=16, width=16, mean=(0.4,), std=(0.6,))


def digits_spec() -> FederationSpec:
    plan = {
        "federation": FEDERATION,
        "classes": DIGITS,
        "input": FORM,
        "method": "local",
        "params": {"epochs": 12, "lr": 2e-3},
        "rounds": 2,
    }
    return complete_spec(FederationPlan.model_validate(plan))


def draw_digits(root: Path, rows: slice) -> None:
    data = digit_images(rows, 16)
    for number, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        folder = root / DIGITS[int(label)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / f"{number:04}.png")


@pytest.mark.slow
def test_the_exported_model_has_the_evaluations_accuracy_on_plain_digits(tmp_path: Path) -> None:
    site, digits = Site(tmp_path, digits_spec(), shadow=1, export=True), tmp_path / "digits"
    draw_digits(digits / "train", slice(0, 900))
    draw_digits(digits / "test", slice(900, 1100))
    draw_digits(tmp_path / "common_digits", slice(1100, 1200))
    give(site, "etc", root=digits, common_test=tmp_path / "common_digits")
    trainer = site.trainer()
    report = trainer.do(site.round())
    assert isinstance(report, RoundCommitted)
    trainer.afterwards(report)

    state = site.state()
    scores = state.generation.scores
    assert scores["best.test"] > 0.7
    assert scores["best_shadow.test"] > 0.7
    assert site.store.generations.snapshot(state.generation).defence == "etc"
    (event,) = site.events("defended")
    assert event["detail"] == "steps IR,IA,IF,IS, block 4, key device"
    installed = read_manifest(ModelVersions(site.store.root / "models").current())
    assert installed.verification.accuracy_onnx == pytest.approx(scores["best.test"])
    for folder, name in ((digits / "test", "test"), (tmp_path / "common_digits", "common")):
        found = data_of(run_fedcg("infer", folder, "--model", site.store.root, "--json").stdout)["results"]
        right = [Path(one["file"]).parent.name == one["class"] for one in found]
        assert float(np.mean(right)) == pytest.approx(scores[f"best.{name}"])

    weights = next((site.store.root / "generations").rglob("state.safetensors"))
    spec = next((site.store.root / "specs").glob("*.json"))
    by_hand = run_fedcg("export", "--spec", spec, "--weights", weights, "--slot", "best", "--out", tmp_path / "by_hand")
    assert by_hand.exit_code == 2
    assert "encrypted by the data defence etc" in " ".join(by_hand.stderr.split())


def test_all_sets_of_a_device_are_encrypted_alike_and_a_second_round_has_the_same_key(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    real = LocalData(site.config.data.root, tmp_path / "common", site.store)
    plain, common = real.for_round(site.spec, 1), real.common_test(site.spec)
    give(site, "etc", common_test=tmp_path / "common")
    first = local(site).for_round(site.spec, 1)
    layer, encrypted_common = present(local(site).input_layer(site.spec)), present(local(site).common_test(site.spec))
    pairs = [*((getattr(first, name), getattr(plain, name)) for name in ("train", "val", "test"))]
    for encrypted, truth in [*pairs, (encrypted_common, present(common))]:
        assert torch.equal(encrypted.images, layer.encrypt(truth.images))
        assert torch.equal(encrypted.labels, truth.labels)
        assert not torch.equal(encrypted.images, truth.images)
    again = local(site).for_round(site.spec, 2)
    assert (again.snapshot, again.snapshot.defended) == (first.snapshot, first.train.digest())


def test_devices_with_one_cohort_secret_encrypt_alike_and_one_without_declines(tmp_path: Path) -> None:
    sites = [Site(tmp_path / name, real_spec("local")) for name in ("a", "b")]
    (sites[1].store.root / "secrets" / "device.key").write_bytes(checked_secret(b"e" * len(DEVICE_KEY)))
    for site in sites:
        give(site, "etc", {"key": "cohort"})
    refusal = sites[0].declined(DeclineReason.SPEC_REFUSED)
    assert "key = cohort needs the cohort secret: run `fedcg cohort join`, or set key = device" in refusal
    for site in sites:
        site.store.keep_cohort_secret(b"c" * 32)
    one, two = (local(site).for_round(site.spec, 1).train.digest() for site in sites)
    assert one == two
    for site in sites:
        give(site, "etc")
    one, two = (local(site).for_round(site.spec, 1).train.digest() for site in sites)
    assert one != two


def test_the_doctor_names_a_file_of_weights_that_is_not_there(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site)
    site.configure(data={"defence_stem": tmp_path / "gone.pth"})
    state, detail = finding(site)
    assert state == "failed"
    assert detail.startswith("antigan-")
    assert detail.endswith(f"defence_stem {tmp_path / 'gone.pth'} is not a file")


def test_before_the_first_round_the_doctor_shows_the_newest_of_several_specs(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site, "etc")
    for spec in (site.spec, site.spec.model_copy(update={"rounds": site.spec.rounds + 1})):
        site.store.save_spec(spec.canonical())
    assert "assumed" not in finding(site)[1]
