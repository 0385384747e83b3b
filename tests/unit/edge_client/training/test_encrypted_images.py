"""`[data] defence = "etc"` on a device: plain images in, right classes out, because the exported model encrypts them itself."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from edge_client.config import DataSection
from edge_client.session.signals import RoundCommitted
from edge_client.training.local_data import LocalData, LocalDefence
from export.build.install_model import package_personal
from export.model.manifest import read_manifest
from export.model.versions import Slots
from fedcg.event_log import EventLog
from fedcg.files import checked_secret
from fedcg.learning.defences.params import EtcParams
from fedcg.learning.defences.scrambling import Scrambling, draw_keys, scrambling_of
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, FederationSpec, ImageForm
from fedcg.learning.tensor_conversion import to_weights
from fedcg.wire.messages.schemas import DeclineReason
from tests.support.commands import data_of, run_fedcg
from tests.support.edge.training_site import DEVICE_KEY, Site, real_spec
from tests.support.edge.world import FEDERATION
from tests.support.learning.networks import DIGITS, digit_images

FORM = ImageForm(mode="L", height=16, width=16, mean=(0.4,), std=(0.6,))


def digits_spec() -> FederationSpec:
    params = {"epochs": 12, "lr": 2e-3}
    plan = {
        "federation": FEDERATION,
        "classes": DIGITS,
        "image": FORM,
        "method": "local",
        "params": params,
        "rounds": 2,
    }
    return complete_spec(FederationPlan.model_validate(plan))


def draw_digits(root: Path, rows: slice) -> None:
    data = digit_images(rows, 16)
    for number, (image, label) in enumerate(zip(data.images, data.labels, strict=True)):
        folder = root / DIGITS[int(label)]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(folder / f"{number:04}.png")


def give(site: Site, root: Path, **params: str | int) -> None:
    data = DataSection(root=root, common_test=root.parent / "common", defence="etc", defence_params=params)
    site.configure(data=data)


def local(site: Site) -> LocalData:
    defence = LocalDefence(site.config.data, site.store, EventLog(site.events_path, lambda: 0.0))
    return LocalData(site.config.data.root, site.config.data.common_test, site.store, defence=defence)


def keyed(root: bytes) -> Scrambling:
    size = 1, FORM.height, FORM.width
    return scrambling_of(draw_keys(Streams(root).at(FEDERATION, "defence"), size), size, EtcParams().order(1))


@pytest.mark.slow
def test_the_exported_model_has_the_evaluations_accuracy_on_plain_digits_and_with_another_key_that_of_chance(
    tmp_path: Path,
) -> None:
    site, digits = Site(tmp_path, digits_spec(), shadow=1, export=True), tmp_path / "digits"
    draw_digits(digits / "train", slice(0, 900))
    draw_digits(digits / "test", slice(900, 1100))
    draw_digits(tmp_path / "common_digits", slice(1100, 1200))
    give(site, digits)
    site.configure(data={"common_test": tmp_path / "common_digits"})
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
    installed = read_manifest(Slots(site.store.root / "models").current())
    assert installed.verification.accuracy_onnx == pytest.approx(scores["best.test"])
    for folder, name in ((digits / "test", "test"), (tmp_path / "common_digits", "common")):
        asked = run_fedcg("infer", folder, "--model", site.store.root, "--json")
        found = data_of(asked.stdout)["results"]
        right = [Path(one["file"]).parent.name == one["class"] for one in found]
        assert float(np.mean(right)) == pytest.approx(scores[f"best.{name}"])

    best, files = to_weights(state.slots["best"]), sorted((digits / "test").rglob("*.png"))
    labels = [int(file.parent.name) for file in files]
    for layer in (keyed(b"another device"), None):
        before = None if layer is None else layer.layer(FORM)
        package_personal(
            site.spec, best, tmp_path / "others", round_number=1, test_files=files, test_labels=labels, before=before
        )
        accuracy = read_manifest(Slots(tmp_path / "others").current()).verification.accuracy_onnx
        assert accuracy is not None
        assert accuracy < 0.35

    weights = next((site.store.root / "generations").rglob("state.safetensors"))
    spec = next((site.store.root / "specs").glob("*.json"))
    by_hand = run_fedcg("export", "--spec", spec, "--weights", weights, "--slot", "best", "--out", tmp_path / "by_hand")
    assert by_hand.exit_code == 2
    assert "the data defence etc encrypted" in " ".join(by_hand.stderr.split())


def test_all_sets_of_a_device_are_encrypted_alike_and_a_second_round_has_the_same_key(tmp_path: Path) -> None:
    site = Site(tmp_path, real_spec("local"))
    real = LocalData(site.config.data.root, tmp_path / "common", site.store)
    plain, common = real.for_round(site.spec, 1), real.common_test(site.spec)
    give(site, tmp_path / "data")
    first = local(site).for_round(site.spec, 1)
    layer, encrypted_common = local(site).input_layer(site.spec), local(site).common_test(site.spec)
    assert layer is not None
    assert common is not None
    assert encrypted_common is not None
    pairs = [*((getattr(first, name), getattr(plain, name)) for name in ("train", "val", "test"))]
    for encrypted, truth in [*pairs, (encrypted_common, common)]:
        assert torch.equal(encrypted.images, layer.encrypt(truth.images))
        assert torch.equal(encrypted.labels, truth.labels)
        assert not torch.equal(encrypted.images, truth.images)
    again = local(site).for_round(site.spec, 2)
    assert again.snapshot == first.snapshot
    assert again.snapshot.defended == first.train.digest()


def test_devices_with_one_cohort_secret_encrypt_alike_and_one_without_declines(tmp_path: Path) -> None:
    sites = [Site(tmp_path / name, real_spec("local")) for name in ("a", "b")]
    (sites[1].store.root / "secrets" / "device.key").write_bytes(checked_secret(b"e" * len(DEVICE_KEY)))
    for site in sites:
        give(site, site.root / "data", key="cohort")
    report = sites[0].declined()
    assert report.reason is DeclineReason.SPEC_REFUSED
    assert "key = cohort needs the cohort secret: `fedcg cohort join`, or set key = device" in report.detail
    for site in sites:
        site.store.keep_cohort_secret(b"c" * 32)
    one, two = (local(site).for_round(site.spec, 1).train.digest() for site in sites)
    assert one == two
    for site in sites:
        give(site, site.root / "data")
    one, two = (local(site).for_round(site.spec, 1).train.digest() for site in sites)
    assert one != two


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"block": 5}, "block = 5 does not divide images of 32x32 pixels"),
        ({"scrambling": "IR,IC"}, "scrambling: IC permutes the channels of colour images"),
    ],
)
def test_images_that_can_not_be_encrypted_so_decline_with_the_parameter(
    tmp_path: Path, params: dict[str, str | int], named: str
) -> None:
    site = Site(tmp_path, real_spec("local"))
    give(site, tmp_path / "data", **params)
    report = site.declined()
    assert report.reason is DeclineReason.SPEC_REFUSED
    assert named in report.detail
