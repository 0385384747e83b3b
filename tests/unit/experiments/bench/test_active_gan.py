"""The active GAN attack: mislabelled images reach the rounds of the attacker alone, and one texture per class is unmixed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from experiments.bench import active_gan as attack
from experiments.simulation.batch import RunSetting
from fedcg.learning.image_set import ImageSet
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import simulated_rounds
from tests.support.simulations import SMALL


def test_the_attacker_alone_trains_on_mislabelled_images_and_the_floor_lacks_the_class(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = {"partition": "classes:2", "images_per_client": 40, "rounds": 2, "method": "fedavg", "params": {}}
    seen = list[list[tuple[int, ...]]]()

    def watched(party: Party, *args: Any, **others: Any) -> object:
        seen.append([party.datasets[name].train.label_counts() for name in ("client-1", "client-2")])
        return simulated_rounds(party, *args, **others)

    monkeypatch.setattr(attack, "_STEPS", 1)
    monkeypatch.setattr(attack, "simulated_rounds", watched)
    monkeypatch.setattr(attack, "trained_judges", lambda *_: [])
    monkeypatch.setattr(attack, "recognised", lambda *_: torch.zeros(1))
    dict(attack.active_gan(RunSetting.model_validate({**SMALL.model_dump(), **more})))
    victim, attacker = zip(*seen, strict=True)
    # Two rounds each of passive and active, with and without the class; images are sent from the second round on.
    assert [sum(one) - sum(attacker[0]) for one in attacker] == [0, 0, 0, 32] * 2
    assert max(attacker[3]) == max(attacker[0]) + 32
    assert [max(victim[0]) - sum(victim[0]) + sum(one) for one in victim] == [max(victim[0])] * 4 + [0] * 4


def test_one_texture_per_class_is_unmixed_and_a_texture_per_image_is_not() -> None:
    stream = torch.Generator().manual_seed(0)
    labels, images = torch.arange(40) % 2, torch.randint(60, 196, (40, 1, 8, 8), generator=stream, dtype=torch.uint8)
    real = ImageSet(images, labels, ("a", "b"))
    textures = torch.randint(256, (40, 1, 8, 8), generator=stream)

    def psnr(texture: torch.Tensor) -> dict[str, float]:
        mixed = replace(real, images=((images + texture) / 2).byte())
        return {name.split(", ")[1]: value for name, value in attack._unmixed(mixed, real, real, 0.5) if "PSNR" in name}

    shared, own = psnr(textures[labels]), psnr(textures)
    assert shared["unmixed"] > 40 > 20 > shared["mixed"]
    assert own["unmixed"] < own["class mean"] + 1
