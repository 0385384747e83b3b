"""What a method has beyond usual parts on a device, and a device whose extractor ends in a private projection on a frozen backbone."""

import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from edge_client.agent.owner import OwnerControl
from edge_client.agent.run import run_agent
from edge_client.cli.doctor.checks import Finding
from edge_client.cli.status import read_status
from edge_client.config import ExportSection, PolicySection, TrainingSection
from edge_client.errors import ConfigError, EdgeError
from edge_client.firewall import check_spec
from edge_client.session.signals import ChooseModel, Chosen, RoundCommitted, Weighed, WeighRound
from edge_client.store.roster import Roster
from edge_client.training import local_round
from export.model.versions import ModelVersions
from fedcg.event_log import EventLog
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.networks.own_backbone import keeps_features
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.networks.timm_backbones import ProjectedBackbone
from fedcg.learning.registry import get_method
from fedcg.learning.spec import BackboneChoice
from fedcg.learning.split_names import WEIGHTS_VARIABLE, weights_digest
from fedcg.learning.tensor_conversion import to_weights
from fedcg.log_output import LogSettings
from fedcg.wire.artifacts.artifacts import unpack
from fedcg.wire.messages.schemas import DeclineReason, RoundAttempt
from fedcg.wire.parts import DEFAULT_ALLOW_UPLOAD, Part
from tests.support.edge.training_site import Site, real_plan, real_spec
from tests.support.edge.world import CLASSES, DEVICE, FEDERATION, FORM, draw_images
from tests.support.learning.networks import TIMM, tiny_plan, write_tiny_weights


def allowing(site: Site) -> Site:
    site.configure(policy=PolicySection(allow_upload=DEFAULT_ALLOW_UPLOAD | frozenset(site.spec.upload)))
    return site


def test_a_cohorts_key_is_declined_without_the_cohort_secret(tmp_path: Path) -> None:
    site = allowing(Site(tmp_path, real_spec("ppidsg", key="cohort")))
    assert site.declined(DeclineReason.SPEC_REFUSED).startswith("method ppidsg needs the cohort secret")
    site.share_cohort_secret()
    site.train(1)


def test_what_a_method_keeps_beside_its_networks_is_there_in_the_next_round(tmp_path: Path) -> None:
    site = allowing(Site(tmp_path, real_spec("ppidsg")))
    site.train(1)
    first = site.state().extras["key"]
    site.train(2)
    second = site.state().extras["key"]
    assert {name: one.tolist() for name, one in second.items()} == {name: one.tolist() for name, one in first.items()}


def test_a_spec_that_seals_what_its_method_does_more_with_than_average_is_declined_and_one_without_the_cohort_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = allowing(Site(tmp_path, complete_spec(real_plan("fedavg").model_copy(update={"sealed": (Part.EXTRACTOR,)}))))
    method, classifier = get_method("fedavg"), frozenset({Part.CLASSIFIER})
    for payload in (replace(method.payload, sealable=classifier), replace(method.payload, sealed=classifier)):
        other = replace(method, payload=payload)
        monkeypatch.setattr(local_round, "get_method", lambda _name, other=other: other)
        refusal = site.declined(DeclineReason.SPEC_REFUSED)
        assert refusal == "the spec's upload list is not that of method fedavg"
    monkeypatch.undo()
    refusal = site.declined(DeclineReason.SPEC_REFUSED)
    assert refusal.startswith("method fedavg needs the cohort secret: `fedcg cohort create` on the first device")


@pytest.mark.parametrize("consents", [False, True])
def test_the_difference_of_two_sums_of_analytic_is_new_images_of_a_device_alone_and_needs_its_owners_consent(
    tmp_path: Path, *, consents: bool
) -> None:
    site = allowing(Site(tmp_path, real_spec("analytic")))
    site.share_cohort_secret()
    consent = Roster({DEVICE: site.store.sum_key().public}, frozenset({DEVICE}))
    site.store.save_roster(consent if consents else replace(consent, alone=frozenset()))

    def summed(number: int) -> NDArray[np.float64]:
        """Class counts and class sums that this device adds to the sum of a round: its moments, times the images that it announces."""
        at, trainer = site.round(number), site.trainer()
        weighed = trainer.do(WeighRound(at.round_attempt, at.spec, at.aggregate))
        assert isinstance(weighed, Weighed)
        assert isinstance(trainer.do(at), RoundCommitted)
        moments = site.state().slots["personal"][Part.STATISTICS]
        return weighed.images * np.column_stack([moments["counts"], moments["sums"]]).astype(np.float64)

    first, training = summed(1), site.data(1).train.label_counts()
    draw_images(site.root / "data" / "train", 3, seed=9)
    shown = [summed(2) - first, summed(3) - first]
    added = np.subtract(site.data(3).train.label_counts(), training)
    assert added.sum() > 0
    warned = site.events("method_warning")
    if consents:
        assert np.allclose(shown[0][:, 0], added, atol=1e-3)
        assert not warned
    else:
        assert not np.any(shown), "else every member could read the features of the new images"
        assert [(event["round"], "`fedcg cohort card --alone`" in event["detail"]) for event in warned] == [(2, True)]


def test_the_exported_model_is_the_methods_own(tmp_path: Path) -> None:
    spec, parts = real_spec("ppidsg", epochs=3), {Part.IMAGE_GENERATOR, Part.EXTRACTOR, Part.CLASSIFIER}
    site = allowing(Site(tmp_path, spec, shadow=1, export=True))
    trainer = site.trainer()
    assert isinstance(trainer.do(site.round()), RoundCommitted)
    done = trainer.do(ChooseModel(spec=spec.digest, aggregate=site.aggregate))
    assert isinstance(done, Chosen)
    assert done.succeeded, site.events("finalise_failed")
    (final,) = site.events("finalised")
    slots = site.state().slots
    best = to_weights(slots["best"])
    assert set(best) == parts
    incoming = to_weights(site.brought())
    chosen = {"own": best, "downloaded": {**to_weights(slots["personal"]), **incoming}}[str(final["candidate"])]
    network = personal_model(spec, chosen)
    assert type(network) is nn.Sequential
    session = onnxruntime.InferenceSession(ModelVersions(site.store.root / "models").current() / "model.onnx")
    pixels = np.random.default_rng(0).integers(0, 256, (2, *spec.image.shape), dtype=np.uint8)
    logits = session.run(["logits"], {session.get_inputs()[0].name: pixels})[0]
    scaled = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).float() / 255
    mean, std = (torch.tensor(one).view(1, -1, 1, 1) for one in (spec.image.mean, spec.image.std))
    images = (scaled - mean) / std
    assert np.allclose(logits, network(images).detach().numpy(), atol=1e-4)
    for part in parts:  # all of them are in the one graph
        without = {**chosen, part: {name: torch.zeros_like(tensor) for name, tensor in chosen[part].items()}}
        assert not np.allclose(logits, personal_model(spec, without)(images).detach().numpy(), atol=1e-2)


GREY = FORM.model_copy(update={"height": 64, "width": 64, "mean": (0.449,), "std": (0.226,)})


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = write_tiny_weights(tmp_path / "weights")
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(path.parent))
    return path


def site_of(tmp_path: Path, weights: Path, *backbones: str, codec: str = "i8-delta") -> Site:
    """A device of a federation with a tiny public backbone, which allows its devices others of their own."""
    plan = tiny_plan("fedcg", weights, server_iterations=2, ramp_rounds=1)
    network = plan.network.model_copy(update={"backbones": tuple(BackboneChoice(name=one) for one in backbones)})
    update = {"federation": FEDERATION, "classes": CLASSES, "input": GREY, "network": network, "codec": codec}
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
    # train with val, test, common; own model, shadow and report read the same ones
    assert sum(seen) == 12 * 3 + 5 * 3 + 4 * 3
    assert trainer.do(site.round(2)) == RoundCommitted(RoundAttempt(2, 1))
    assert len(seen) == 4
    assert set(site.state().slots["personal"][Part.EXTRACTOR]) == {"project.weight", "project.bias"}


def test_a_spec_whose_weights_are_not_here_is_declined_until_the_owner_names_their_folder_in_agent_toml(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path, weights)
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")
    reason, text = check_spec(site.spec, PolicySection()) or (None, "")
    assert (reason, "matches no local file" in text) == (DeclineReason.SPEC_REFUSED, True)

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


def test_the_doctor_finds_weights_and_backbones_that_can_not_be_had(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = site_of(tmp_path, weights, "resnet18")
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")

    def found(**training: object) -> Finding:
        site.configure(training=TrainingSection.model_validate({"device": "cpu", **training}))
        return site.finding("training")

    own = f"timm:{TIMM}"
    assert found(weights=weights, backbone=own).state == "ok"
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        nothing = found(weights=tmp_path / place, backbone=own)
        assert (nothing.state, "copy the file" in nothing.advice) == ("failed", True)
        assert f"{place}: not a file, and not a folder with" in nothing.detail
    assert "matches no local file" in found(backbone=own).detail
    assert "no backbone 'nope'" in found(weights=weights, backbone="nope").detail
    assert "is not allowed by the federation" in found(weights=weights, backbone="mobilenetv3_small_100").detail


def test_a_device_trains_its_own_backbone_sends_what_fits_all_and_stays_with_it(tmp_path: Path, weights: Path) -> None:
    site = site_of(tmp_path, weights, "timm:test_resnet", codec="f32")

    def choose(backbone: str) -> None:
        site.configure(training={"backbone": backbone}, export=ExportSection(variants=False))

    choose("timm:test_resnet")
    trainer = site.trainer()
    assert trainer.do(site.round(1)) == RoundCommitted(RoundAttempt(1, 1))
    state = site.state()
    assert (state.generation.backbone, state.generation.spec) == ("timm:test_resnet", site.spec.digest)
    assert any(name.startswith("backbone.") for name in state.slots["personal"][Part.EXTRACTOR])
    assert set(unpack(site.update(), site.shared).parts) == {Part.CLASSIFIER, Part.GENERATOR}
    assert trainer.do(site.end) == Chosen(site.aggregate, succeeded=True)

    owner = OwnerControl(site.config, site.store, EventLog(tmp_path / "owner.jsonl", time.time), time.time)
    assert owner.check(site.spec) is None
    choose("auto")  # as before, whatever the hardware
    site.train(2)
    choose(f"timm:{TIMM}")
    refusal = site.declined(DeclineReason.SPEC_REFUSED, 3)
    assert "were trained with timm:test_resnet, but [training] backbone is now timm:test_efficientnet" in refusal
    owner = OwnerControl(site.config, site.store, EventLog(tmp_path / "owner.jsonl", time.time), time.time)
    assert (owner.check(site.spec) or ("",))[0] is DeclineReason.SPEC_REFUSED
