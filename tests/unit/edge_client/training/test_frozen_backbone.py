"""A device whose extractor ends in a private projection on a frozen backbone: features once, pinned weights, `[training] weights`."""

import os
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from edge_client.agent.owner import OwnerControl
from edge_client.agent.run import run_agent
from edge_client.cli.doctor.checks import Finding, examine
from edge_client.cli.status import read_status
from edge_client.config import ExportSection, PolicySection, TrainingSection
from edge_client.errors import ConfigError, EdgeError
from edge_client.firewall import check_spec
from edge_client.session.signals import Chosen, RoundCommitted
from fedcg.event_log import EventLog
from fedcg.learning.networks.own_backbone import keeps_features
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.networks.timm_backbones import ProjectedBackbone
from fedcg.learning.spec import BackboneChoice
from fedcg.learning.split_names import WEIGHTS_VARIABLE, weights_digest
from fedcg.log_output import LogSettings
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import Part
from tests.support.edge.training_site import Site
from tests.support.edge.world import CLASSES, FEDERATION, FORM
from tests.support.learning.networks import TIMM, tiny_plan, write_tiny_weights

GREY = FORM.model_copy(update={"height": 64, "width": 64, "mean": (0.449,), "std": (0.226,)})


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_tiny_weights(tmp_path / "weights")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(path.parent))
    return path


def site_of(tmp_path: Path, weights: Path) -> Site:
    plan = tiny_plan("fedcg", weights, server_iterations=2, ramp_rounds=1)
    update = {"federation": FEDERATION, "classes": CLASSES, "image": GREY}
    return Site(tmp_path / "device", complete_spec(plan.model_copy(update=update)), shadow=1)


def test_rounds_train_on_features_that_are_computed_once_and_keep_the_projection_alone(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, seen = site_of(tmp_path, weights), list[int]()
    plain = ProjectedBackbone.pooled

    def counted(self: ProjectedBackbone, images: object) -> object:
        seen.append(len(images))  # type: ignore[arg-type]
        return plain(self, images)  # type: ignore[arg-type]

    monkeypatch.setattr(ProjectedBackbone, "pooled", counted)
    trainer = site.trainer()
    assert trainer.do(site.round(1)) == RoundCommitted(RoundAttempt(1, 1))
    assert (
        sum(seen) == 12 * 3 + 5 * 3 + 4 * 3
    )  # train with val, test, common; own model, shadow and report read the same ones
    assert trainer.do(site.round(2)) == RoundCommitted(RoundAttempt(2, 1))
    assert len(seen) == 4
    state = site.state().slots["personal"][Part.EXTRACTOR]
    assert set(state) == {"project.weight", "project.bias"}


def test_a_spec_whose_weights_are_not_here_is_declined_before_anything_is_trained(
    tmp_path: Path, weights: Path
) -> None:
    site = site_of(tmp_path, weights)
    assert check_spec(site.spec, PolicySection()) is None
    weights.unlink()
    reason, text = check_spec(site.spec, PolicySection()) or (None, "")
    assert reason is DeclineReason.SPEC_REFUSED
    assert "sha256 of no file here" in text


def test_the_owner_names_a_folder_of_weights_in_agent_toml(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path, weights)
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")

    def run(path: Path) -> None:
        training = TrainingSection(weights=path)
        config = site.config.model_copy(
            update={"training": training, "keys": site.config.keys.model_copy(update={"signing": tmp_path / "no.key"})}
        )
        run_agent(config, LogSettings(), lambda: (), until_finished=True)

    with pytest.raises(ConfigError, match=r"training\.weights = .*: no such file or folder"):
        run(tmp_path / "gone")
    with pytest.raises(EdgeError, match=r"no\.key"):  # after the weights
        run(weights.parent)
    assert os.environ[WEIGHTS_VARIABLE] == str(weights.parent)
    assert check_spec(site.spec, PolicySection()) is None
    assert site.spec.network.weights == weights_digest(weights)
    assert keeps_features(site.spec)


def test_the_status_names_the_public_backbone_and_where_the_projection_starts(tmp_path: Path, weights: Path) -> None:
    site = site_of(tmp_path, weights)
    public = f"backbone public (sha256 {weights_digest(weights)[:12]}, frozen), projection from the"
    assert read_status(site.config)["private_parts_start"] == f"{public} public spec seed"
    site.share_cohort_secret()
    assert read_status(site.config)["private_parts_start"] == f"{public} cohort secret"


def test_the_status_names_the_devices_own_backbone_and_all_where_it_can_not_be_told(
    tmp_path: Path, weights: Path
) -> None:
    plan = tiny_plan("fedcg", weights, server_iterations=2, ramp_rounds=1)
    network = plan.network.model_copy(update={"backbones": (BackboneChoice(name="resnet18"),)})
    update = {"federation": FEDERATION, "classes": CLASSES, "image": GREY, "network": network}
    site = Site(tmp_path / "device", complete_spec(plan.model_copy(update=update)))

    def start(backbone: str) -> object:
        training = TrainingSection(device="cpu", backbone=backbone)
        return read_status(site.config.model_copy(update={"training": training}))["private_parts_start"]

    assert start("resnet18") == "public spec seed"
    assert str(start(f"timm:{TIMM}")).startswith("backbone public (sha256 ")
    assert str(start("nope")).startswith(f"timm:{TIMM}: backbone public (sha256 ")


def test_the_doctor_finds_weights_and_backbones_that_can_not_be_had(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = tiny_plan("fedcg", weights, server_iterations=2, ramp_rounds=1)
    network = plan.network.model_copy(update={"backbones": (BackboneChoice(name="resnet18"),)})
    update = {"federation": FEDERATION, "classes": CLASSES, "image": GREY, "network": network}
    site = Site(tmp_path / "device", complete_spec(plan.model_copy(update=update)))
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")

    def found(**training: object) -> Finding:
        section = TrainingSection.model_validate({"device": "cpu", **training})
        config = site.config.model_copy(update={"training": section})
        return examine(config, datetime.now(timezone.utc), ["training"])[0]

    own = f"timm:{TIMM}"
    assert found(weights=weights, backbone=own).state == "ok"
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        nothing = found(weights=tmp_path / place, backbone=own)
        assert (nothing.state, "bring the file" in nothing.advice) == ("failed", True)
        assert f"{place}: no file, and no folder with" in nothing.detail
    assert "is the sha256 of no file here" in found(backbone=own).detail
    assert "no backbone named 'nope'" in found(weights=weights, backbone="nope").detail
    assert "none of those that the federation allows" in found(weights=weights, backbone="mobilenetv3_small_100").detail


def test_the_choice_at_the_end_reads_the_same_features_and_the_exported_model_takes_images(
    tmp_path: Path, weights: Path
) -> None:
    site = site_of(tmp_path, weights)
    site.configure(export=ExportSection(enabled=True, each_best=False, variants=False))
    trainer = site.trainer()
    trainer.do(site.round(1))
    kept = trainer._work.features
    before = kept._kept
    chosen = trainer.do(site.end)
    assert isinstance(chosen, Chosen)
    assert chosen.succeeded, site.events("finalise_failed")
    assert kept._kept is before
    (told,) = site.events("finalised")
    assert told["accuracy_common_onnx"] == pytest.approx(told["accuracy_common_personal"])


def test_a_device_trains_its_own_backbone_sends_what_fits_all_and_stays_with_it(tmp_path: Path, weights: Path) -> None:
    plan = tiny_plan("fedcg", weights, server_iterations=2, ramp_rounds=1)
    network = plan.network.model_copy(update={"backbones": (BackboneChoice(name="timm:test_resnet"),)})
    update = {"federation": FEDERATION, "classes": CLASSES, "image": GREY, "network": network, "codec": "f32"}
    site = Site(tmp_path / "device", complete_spec(plan.model_copy(update=update)), shadow=1)

    def choose(backbone: str) -> None:
        site.configure(training={"backbone": backbone}, export=ExportSection(variants=False))

    choose("timm:test_resnet")
    trainer = site.trainer()
    assert trainer.do(site.round(1)) == RoundCommitted(RoundAttempt(1, 1))
    state = site.state()
    assert (state.generation.backbone, state.generation.spec) == ("timm:test_resnet", site.spec.digest)
    assert any(name.startswith("backbone.") for name in state.slots["personal"][Part.EXTRACTOR])
    layouts = {part: site.spec.layouts[part] for part in site.spec.upload}
    sent = unpack(site.store.generations.update_bytes(state.generation) or b"", layouts).parts
    assert set(sent) == {Part.CLASSIFIER, Part.GENERATOR}
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)

    owner = OwnerControl(site.config, site.store, EventLog(tmp_path / "owner.jsonl", time.time), time.time)
    assert owner.check(site.spec) is None
    choose("auto")  # as before, whatever the hardware
    site.train(2)
    choose(f"timm:{TIMM}")
    failed = site.declined(3)
    assert failed.reason is DeclineReason.SPEC_REFUSED
    assert "were trained with timm:test_resnet, and [training] backbone is now timm:test_efficientnet" in failed.detail
    owner = OwnerControl(site.config, site.store, EventLog(tmp_path / "owner.jsonl", time.time), time.time)
    assert (owner.check(site.spec) or ("",))[0] is DeclineReason.SPEC_REFUSED
