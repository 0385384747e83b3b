"""`fedcg simulate` and `fedcg network` with a backbone of timm's whose weights are in a file."""

import json
from pathlib import Path

import pytest
import torch

from fedcg.learning.networks import own_backbone
from fedcg.learning.networks.timm_backbones import ProjectedBackbone
from fedcg.learning.spec import FederationSpec
from fedcg.learning.split_names import WEIGHTS_VARIABLE, weights_digest
from tests.support.commands import data_of, run_fedcg, succeeds
from tests.support.learning.networks import SPLIT, write_tiny_weights

IMAGES = "--image-size 64 --normalise imagenet"
TINY = (
    f"simulate {IMAGES} --clients 2 --images-per-client 12 --rounds 2 --local-epochs 1 --workers 1 --no-plot "
    "--no-tensorboard --test even"
)


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(WEIGHTS_VARIABLE, "")
    return write_tiny_weights(tmp_path / "weights")


def said(output: str) -> str:
    return " ".join(output.replace("│", " ").split())


def test_a_simulation_on_a_frozen_backbone_computes_its_features_once_for_all_methods(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    plain = own_backbone.frozen_backbone

    def counted(spec: FederationSpec, device: str) -> ProjectedBackbone:
        passes.append(device)
        return plain(spec, device)

    monkeypatch.setattr(own_backbone, "frozen_backbone", counted)
    out = tmp_path / "out"
    both = f"--network {SPLIT} --method fedsplit --method fedcg --set fedcg.server_iterations=3 --freeze all"
    succeeds(*f"{TINY} {both}".split(), "--weights", weights.parent, "--out", out)
    assert len(passes) == 1
    records = [json.loads(path.read_text()) for path in sorted(out.glob("*seed0.json"))]
    assert [record["method"] for record in records] == ["fedcg", "fedsplit"]
    network = records[0]["setting"]
    assert (network["freeze"], network["weights"]) == ("all", "weights")  # no path of this machine
    assert records[0]["network"]["weights"] == weights_digest(weights)
    succeeds("simulate", "--resume", out, "--no-plot", "--no-tensorboard")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--freeze all", "no weights of timm:test_efficientnet found"),
        ("--freeze all --weights random", "freeze = all needs pretrained weights"),
        ("--weights nowhere", "not a file, and not a folder with"),
        ("--weights FILE --network lenet5", "--weights are for a backbone with a projection"),
    ],
)
def test_what_cannot_be_simulated_is_explained_before_anything_starts(
    weights: Path, tmp_path: Path, options: str, problem: str
) -> None:
    words = f"{TINY} --network {SPLIT} {options}" if "--network" not in options else f"{TINY} {options}"
    done = run_fedcg(*words.replace("FILE", str(weights)).split(), "--out", tmp_path / "out")
    assert done.exit_code != 0
    assert problem in said(f"{done.output} {done.exception}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", ["simulate", "demo"])
def test_weights_that_do_not_fit_end_a_command_before_it_starts(weights: Path, tmp_path: Path, command: str) -> None:
    file = tmp_path / "w.pt"
    torch.save({"conv_stem.weight": torch.zeros(1)}, file)
    words = TINY if command == "simulate" else f"demo {IMAGES}"
    done = run_fedcg(*words.split(), "--network", SPLIT, "--weights", file, "--out", tmp_path / "out")
    assert done.exit_code == 2, done.output
    assert "w.pt: no" in said(done.output)
    assert not (tmp_path / "out").exists()


def test_a_random_start_needs_no_file(tmp_path: Path, weights: Path) -> None:
    succeeds(*f"{TINY} --network {SPLIT} --method local --weights random --rounds 1 --out".split(), tmp_path / "out")


def test_the_list_names_backbones_and_where_their_weights_are(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = weights.rename(weights.with_name("resnet18.safetensors"))
    monkeypatch.setenv(WEIGHTS_VARIABLE, str(weights.parent))
    listed = data_of(run_fedcg("network", "list", "--json").output)["backbones"]
    assert listed["resnet18"] == {"file": str(renamed), "sha256": weights_digest(renamed)}
    assert listed["mobilenetv3_small_100"] is None
    text = run_fedcg("network", "list").output
    assert "mobilenetv3_small_100: not found (docs/how-to/backbones.md)" in text
