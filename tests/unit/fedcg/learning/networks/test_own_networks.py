"""A user's own split and generator: found only where registered or allowed, tried before they are used, and trained like any other."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from export.build.to_onnx import export_personal, verify
from fedcg.learning.errors import ExtensionError, NetworkError
from fedcg.learning.method import Aggregate
from fedcg.learning.networks import NETWORKS, feature_shape, splits
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.registry import get_method
from fedcg.learning.spec import NetworkChoice
from fedcg.learning.split_names import ALLOW_VARIABLE
from fedcg.wire.parts import Part
from tests.support import installed
from tests.support.commands import data_of, run_fedcg
from tests.support.installed import importable, register
from tests.support.learning.learning_cases import bright_images, context, plan, same

PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "add-a-network.md"
PRELUDE = """
import random
import torch
from torch import nn
from fedcg.learning.networks import FeatureRange, Split

def extractor(channels):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 256, 6), nn.ReLU())

def classifier(shape, classes):
    return nn.Linear(6, classes)

"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on the import path, and nothing registered or allowed."""
    monkeypatch.delenv(ALLOW_VARIABLE, raising=False)
    splits._imported.cache_clear()
    yield from importable(tmp_path, monkeypatch)


def documented(folder: Path) -> str:
    code, _ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "our_networks.py").write_text(code)
    return "our_networks:small_residual"


def choice(split: str) -> NetworkChoice:
    return NetworkChoice(split=split, noise_dim=8)


def register_split(folder: Path, package: str, name: str, target: str) -> None:
    installed.register(folder, package, "fedcg.splits", name, target)


def test_a_split_neither_registered_nor_allowed_is_not_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = documented(folder)
    for allowed in ("", "our_networks:other", "our_networks"):
        monkeypatch.setenv(ALLOW_VARIABLE, allowed)
        with pytest.raises(NetworkError, match=r"is not allowed on this machine: .*FEDCG_ALLOW_SPLITS"):
            complete_spec(plan("fedcg", choice(target)))
    assert "our_networks" not in sys.modules
    with pytest.raises(NetworkError, match="no split 'small_residual'; choose from lenet5"):
        complete_spec(plan("fedcg", choice("small_residual")))


@torch.no_grad()  # as where a process measures a model before it trains one
def test_a_registered_split_goes_by_its_name_and_by_its_function(folder: Path) -> None:
    target = documented(folder)
    register_split(folder, "ours", "small_residual", target)
    for name in ("small_residual", target):
        assert feature_shape(plan("fedcg", choice(name))) == (8, 4, 4)


def test_two_packages_that_register_one_name_are_an_error_that_names_both(folder: Path) -> None:
    register_split(folder, "ours", "small_residual", documented(folder))
    register_split(folder, "theirs", "small_residual", "elsewhere:small_residual")
    with pytest.raises(ExtensionError, match=r"two installed packages register 'small_residual' in fedcg\.splits"):
        complete_spec(plan("fedcg", choice("small_residual")))


def test_the_documented_split_trains_repeatably_with_its_dropout_and_is_exported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = documented(folder)
    monkeypatch.setenv(ALLOW_VARIABLE, f"others:made, {target}")
    before = torch.get_rng_state()
    spec = complete_spec(plan("fedcg", choice(target)))
    initial = initial_parts(spec, b"cohort")
    assert same(initial[Part.EXTRACTOR], initial_parts(spec, b"cohort")[Part.EXTRACTOR])
    assert not same(initial[Part.EXTRACTOR], initial_parts(spec, b"other")[Part.EXTRACTOR])
    method = get_method("fedcg")
    state, data = method.init_client(spec, initial), bright_images(24, 0)
    results = [method.local_round(state, data, Aggregate(dict(initial)), context(spec)) for _ in range(2)]
    for part in NETWORKS:
        assert same(results[0].private.parts[part], results[1].private.parts[part])
        assert not same(results[0].private.parts[part], initial[part])
    assert torch.equal(torch.get_rng_state(), before)
    export_personal(spec, results[0].private.parts, tmp_path / "model.onnx")
    assert verify(tmp_path / "model.onnx", spec, results[0].private.parts, [], []).top1_agreement == 1.0


def split(extractor: str = "extractor", half: str = "classifier", kind: str = "NON_NEGATIVE") -> str:
    """Code of a split with this extractor, classifier and range of features."""
    return f"def make(): return Split({extractor}, {half}, FeatureRange.{kind})"


def own(method: str, extractor: str = "extractor") -> str:
    """Code of a split whose classifier is a linear layer with a method of its own."""
    return f"class Own(nn.Linear):\n    {method}\n{split(extractor, 'lambda s, c: Own(6, c)')}"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import not_there\ndef make(): ...", "ModuleNotFoundError: No module named 'not_there'"),
        (
            split("lambda c: nn.Flatten()", kind="UNIT"),
            r"returns features from -\d.* to .*, but its feature_range is unit",
        ),
        (split(half="lambda s, c: nn.Linear(6, c + 1)"), r"the classifier returns \[3, 4\] for \[3, 6\], not \[3, 3\]"),
        (split("lambda c: extractor(c).double()"), r"the extractor has 1\.weight of type torch\.float64"),
        (
            own("def __init__(self, *_): super().__init__(6, 3); nn.init.constant_(self.weight, random.random())"),
            "the classifier has different initial values in weight at every build",
        ),
        (
            own("def forward(self, x): return super().forward(x - x.mean(0))"),
            "the classifier returns different values for a row alone and in a batch",
        ),
        (
            own("def __init__(self, *_): super().__init__(6, 3); nn.init.constant_(self.bias, float('nan'))"),
            "the classifier has initial values in bias that are not finite",
        ),
    ],
)
def test_what_is_wrong_with_a_split_is_said_with_its_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, problem: str
) -> None:
    (folder / "wrong_split.py").write_text(PRELUDE + code + "\n")
    monkeypatch.setenv(ALLOW_VARIABLE, "wrong_split:make")
    with pytest.raises(NetworkError, match=rf"split wrong_split:make.*{problem}"):
        complete_spec(plan("fedcg", choice("wrong_split:make")))


TINY = "--clients 2 --images-per-client 20 --image-size 16 --rounds 1 --local-epochs 1 --workers 1"
QUIET = ("--no-shadow", "--no-plot", "--no-tensorboard", "--json")
LINEAR = """
from torch import nn

class Linear(nn.Linear):
    def __init__(self, shape, noise, last):
        super().__init__(noise, 16)
        self.shape, self.last = shape, last

    def forward(self, noise, labels):
        return self.last(super().forward(noise)).view(-1, *self.shape)
"""


def install(folder: Path, code: str, name: str = "one_layer") -> None:
    (folder / "our_generators.py").write_text(code)
    register(folder, "ours", "fedcg.generators", name, "our_generators:one_layer")


def test_the_documented_generator_is_listed_trained_and_sent(folder: Path, tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    install(folder, code)
    assert "one_layer" in data_of(run_fedcg("network", "list", "--json").output)["generators"]
    asked = ("--method", "fedcg", "--generator", "one_layer", "--set", "server_iterations=2", *TINY.split(), *QUIET)
    done = run_fedcg("simulate", *asked, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (record,) = data_of(done.stdout)["runs"]
    assert record["network"]["generator"] == "one_layer"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def another(*asked): ...", "our_generators:one_layer: AttributeError"),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return Linear((4, 4), n, nn.ReLU())",
            r"our_generators:one_layer returns features \[3, 4, 4\], not \[3, 16, 1, 1\]",
        ),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return Linear(s, n, nn.Tanh())",
            r"returns features from -0\.\d+ to .*, but the split's range is non_negative: end it in a sigmoid",
        ),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return nn.GRU(n, 16)",
            "no known initial values for weight_ih_l0, .* add a method reset",
        ),
    ],
)
def test_a_broken_generator_is_refused_with_the_name_of_its_entry(folder: Path, code: str, problem: str) -> None:
    install(folder, code)
    with pytest.raises(ExtensionError, match=problem):
        complete_spec(plan("fedcg", NetworkChoice(generator="one_layer", noise_dim=8)))
