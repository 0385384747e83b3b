"""`fedcg bench privacy published`: what its figures are made of, in small settings in which the attacks work."""

import json
import math
from pathlib import Path

import pytest

from experiments.bench import published
from tests.support.commands import data_of, fails, succeeds

SMALL = {"clients": 2, "image_size": 16, "images_per_client": 80, "rounds": 1, "local_epochs": 1, "lr": 1e-3}


def figures_of(name: str, out: Path, monkeypatch: pytest.MonkeyPatch, **changed: object) -> dict[str, float]:
    """Of a row `small` of an experiment, as the command prints and records them."""
    entry = {"setting": {**SMALL, **changed}, "rows": {"small": {}, "other": {}}}
    monkeypatch.setattr(published, "_SETTINGS", {**published._SETTINGS, name: entry})
    words = ("bench", "privacy", "published", name, "--row", "small", "--seeds", "3", "--out", out, "--json")
    shown = data_of(succeeds(*words))
    record = json.loads((out / name / "digits-small-seed3.json").read_text())
    assert shown == {f"digits, small: {title}": [value] for title, value in record["figures"].items()}
    assert record["command"] == f"fedcg bench privacy published {name} --row small --data digits --seeds 3"
    assert data_of(succeeds(*words)) == shown
    assert len(list(out.rglob("*.json"))) == 1
    return dict(record["figures"])


def test_a_batch_as_its_own_probes_gives_its_labels_and_compression_hides_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "_SIZES", (32,))
    monkeypatch.setattr(published, "_TRIES", 2)
    found = figures_of("labels", tmp_path, monkeypatch, network="lenet5", method="fedavg")
    assert found["batches of 32, initial, itself, none"] == found["batches of 32, initial, itself, GC 10 %"] == 1
    assert found["control, one class, initial, gaussian, none"] == 1
    assert found["control, one class, trained, best guess"] <= 0.2


def test_as_published_the_model_that_a_suspect_passes_is_told_and_not_the_suspect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = figures_of("membership", tmp_path, monkeypatch, method="fedavg", local_epochs=20, images_per_client=200)
    assert found["part, published"] == found["all, published"]  # with two clients
    assert abs(found["part, victim"] - 0.5) < 0.15
    assert min(found[f"part, {arm}"] for arm in ("published", "untouched", "swapped")) > 0.6


def test_the_key_space_is_that_of_eq_12_and_another_key_classifies_by_chance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = figures_of("keys", tmp_path, monkeypatch, network="image_small", method="ppidsg", local_epochs=12, lr=0.01)
    # 16 blocks of 4x4: 16! orders, each with 4 rotations, 2 complements, 3 flips and 1 order of its channel
    assert found["log10 of the key space"] == pytest.approx(
        math.log10(math.factorial(16)) + 16 * math.log10(24), abs=1e-4
    )
    assert found["accuracy, another key"] < 0.3 < found["accuracy, trained"]
    assert {"accuracy, key", "PSNR of G(image)", "PSNR of G(noise)"} < found.keys()


@pytest.mark.slow
def test_a_transformed_image_is_found_as_the_network_saw_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(published, "_IMAGES", 1)
    defences = {"none": {}, "DP <5, 10>": published._SETTINGS["defences"]["DP <5, 10>"]}
    monkeypatch.setitem(published._SETTINGS, "defences", defences)
    found = figures_of("reconstruction", tmp_path, monkeypatch, method="fedavg")
    assert found["none, real image"] > found["mean image"] > found["DP <5, 10>, real image"]
    assert found["etc, image seen"] > found["etc, real image"] + 5


def test_an_unknown_experiment_is_refused_with_the_known_ones() -> None:
    assert "there are labels, membership, keys, reconstruction" in fails(2, "bench", "privacy", "published", "nothing")
