"""kill -9 of a real training process in the middle of a 20-epoch round: the next one goes on, and the update has the same sha256."""

import hashlib
from pathlib import Path

import pytest

from edge_client.config import PolicySection, TrainingSection
from fedcg.learning.registry import get_method
from tests.support.edge.killed_trainer import KilledTrainer
from tests.support.edge.training_site import Site, real_spec
from tests.support.edge.world import draw_images

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def site_of(root: Path, method: str) -> Site:
    site = Site(root, real_spec(method, epochs=20))
    draw_images(root / "data" / "train", 300, seed=4)
    training = TrainingSection(device="cpu", threads=1, checkpoint_s=0.3, shadow_every=2)
    site.configure(training=training, policy=PolicySection(allow_upload=get_method(method).payload.up))
    return site


def steps(site: Site, phase: str) -> list[int]:
    return [int(event["step"]) for event in site.events("progress") if event["phase"] == phase]


@pytest.mark.parametrize("method", ["fedcg", "fedavg"])
def test_a_trainer_that_is_killed_in_mid_round_goes_on_and_the_update_is_the_same(tmp_path: Path, method: str) -> None:
    undisturbed, killed = site_of(tmp_path / "undisturbed", method), site_of(tmp_path / "killed", method)
    KilledTrainer(undisturbed.config).train(undisturbed.round())
    checkpoint = killed.store.root / "checkpoint.bin"
    KilledTrainer(killed.config).train_and_kill(killed.round(), checkpoint)
    assert killed.events("committed") == []
    before = len(steps(killed, "classify"))
    KilledTrainer(killed.config).train(killed.round())
    later = steps(killed, "classify")[before:]
    assert not later or later[0] > 1, "the second process began the stage anew"
    assert hashlib.sha256(killed.update()).hexdigest() == hashlib.sha256(undisturbed.update()).hexdigest()
    assert "shadow" in killed.state().slots
    checksums = [dict(site.state().generation.checksums) for site in (killed, undisturbed)]
    assert checksums[0] == checksums[1], "the shadow too"
    assert not checkpoint.exists()
