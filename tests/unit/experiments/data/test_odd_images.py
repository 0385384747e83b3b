"""`fedcg simulate` on images as people really have them: published folder layouts, odd clients, broken files, networks that do not fit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import Result

from fedcg.learning.split_names import ALLOW_VARIABLE
from tests.support.commands import data_of, run_fedcg

ODD = {  # images of a class, and how they are stored, per domain
    "all": ({"a": 16, "b": 16, "c": 16}, "RGB"),
    "grey": ({"a": 16, "b": 16}, "L"),
    "one-class": ({"b": 12}, "RGB"),
    "one-image": ({"c": 1}, "RGB"),
}
LAYOUTS = {
    "digit5": (["mnist", "mnist_m", "svhn", "syn", "usps"], ["train_images", "test_images"], list("0123456789")),
    "office": (["amazon", "caltech", "dslr", "webcam"], [""], ["back_pack", "bike", "calculator"]),
    "domainnet": (
        ["clipart", "infograph", "painting", "quickdraw", "real", "sketch"],
        [""],
        ["bird", "feather", "zebra"],
    ),
}
DOMAINS = {
    "digit5": ["mnist_m", "svhn", "syn", "usps"],
    "office": ["amazon", "dslr", "webcam", "caltech"],
    "domainnet": ["clipart", "infograph", "quickdraw", "real", "sketch"],
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setenv(ALLOW_VARIABLE, "")  # what a command allows itself ends with the test


def fill(folder: Path, count: int, level: int, mode: str = "RGB", first: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(first, first + count):
        stream = np.random.default_rng([len(folder.parts), level, number])
        pixels = level + stream.integers(0, 60, (16, 16) if mode == "L" else (16, 16, 3))
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")


def call(folder: Path, *arguments: str) -> Result:
    quick = "--rounds 1 --local-epochs 1 --workers 1 --no-plot --no-tensorboard --no-shadow --json"
    return run_fedcg("simulate", *quick.split(), "--out", folder / "out", *arguments)


@pytest.mark.parametrize(
    "method",
    [
        "fedsplit",
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in ("local", "fedavg", "fedper", "fedgen", "fedcg", "fedmd_cg")
        ),
    ],
)
def test_odd_clients_take_part_as_far_as_they_can_and_the_record_says_what_was_wrong(
    method: str, tmp_path: Path
) -> None:
    for domain, (classes, mode) in ODD.items():
        for label, count in classes.items():
            for part in ("train", "test"):
                fill(tmp_path / "odd" / domain / part / label, count, 60 * "abc".index(label), mode)
    (tmp_path / "odd" / "all" / "train" / "a" / "broken.png").write_bytes(b"\x89PNG and no more")
    server = ["--set", "server_iterations=3"] if method in {"fedgen", "fedcg", "fedmd_cg"} else []
    dealt = "--partition domains --clients 4 --image-size 16 --rounds 2 --test even --validation test-half"
    done = call(tmp_path, "--data", str(tmp_path / "odd"), *dealt.split(), "--method", method, *server)
    assert done.exit_code == 0, done.stderr
    (record,) = data_of(done.stdout)["runs"]
    assert record["skipped"] == [{"file": "a/broken.png", "reason": record["skipped"][0]["reason"]}]
    assert "not an image" in record["skipped"][0]["reason"]
    counts = [client["label_counts"] for client in record["clients"]]
    assert counts == [[16, 16, 16], [16, 16, 0], [0, 12, 0], [0, 0, 1]]
    reasons = [{failure["reason"] for failure in client["failures"]} for client in record["clients"]]
    assert reasons == [set(), set(), set(), {"1 training images: at least 2 are needed"}]
    assert record["server_failures"] == []
    assert all(
        client["accuracy_personal"] is not None for client in record["clients"][:3]
    )  # the last has nothing to test on
    assert "local rounds undone: 2" in done.stderr
    assert "images skipped: 1" in done.stderr


@pytest.mark.parametrize(
    "name", ["office", *(pytest.param(one, marks=pytest.mark.slow) for one in ("digit5", "domainnet"))]
)
def test_the_papers_domains_load_as_they_are_published(name: str, tmp_path: Path) -> None:
    domains, parts, classes = LAYOUTS[name]
    for domain in domains:
        for part in parts:
            for label, one in enumerate(classes):
                fill(tmp_path / name / domain / part / one, 6, 15 * label)
    chosen = f"--paper fedcg:table1:{name} --method fedsplit --seeds 0"
    done = call(tmp_path, *chosen.split(), "--data", str(tmp_path / name))
    assert done.exit_code == 0, done.stderr
    (record,) = data_of(done.stdout)["runs"]
    assert record["partition"] == f"domains:{','.join(DOMAINS[name])}"
    # Digit5 brings its test part; of the others a half trains and a half is tested, one half of which chooses the round.
    half = 1 if name == "digit5" else 2
    assert {client["train_images"] for client in record["clients"]} == {6 * len(classes) // half}
    assert len(record["clients"]) == len(DOMAINS[name])
    assert set(record["reduced"]) == {"rounds", "params.epochs"}


def test_a_network_of_ones_own_that_does_not_fit_ends_the_call_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_seven.py").write_text(
        "from torch import nn\nfrom fedcg.learning.networks import FeatureRange, Split\n"
        "def make(): return Split(lambda c: nn.Sequential(nn.Conv2d(c, 2, 3), nn.ReLU()), "
        "lambda s, n: nn.Sequential(nn.Flatten(), nn.Linear(392, 7)), FeatureRange.NON_NEGATIVE)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    done = call(tmp_path, "--network", "own_seven:make", "--image-size", "16")
    assert done.exit_code == 2, done.output
    assert "split own_seven:make" in done.stderr
    assert "the classifier makes [3, 7] of [3, 2, 14, 14], not [3, 10]" in done.stderr
    assert not (tmp_path / "out").exists()
