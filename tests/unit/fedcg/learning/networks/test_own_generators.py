"""A user's own generator: registered by an installed package, tried before it is used, and trained like any other."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedcg.learning.errors import ExtensionError
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.spec import NetworkChoice
from tests.support.commands import data_of, run_fedcg
from tests.support.installed import importable, register
from tests.support.learning.learning_cases import plan

PAGE = Path(__file__).parents[5] / "docs" / "adding-a-network.md"
TINY = (
    "--clients",
    2,
    "--images-per-client",
    20,
    "--image-size",
    16,
    "--rounds",
    1,
    "--local-epochs",
    1,
    "--workers",
    1,
)
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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "packages"
    place.mkdir()
    yield from importable(place, monkeypatch)


def install(folder: Path, code: str, name: str = "one_layer") -> None:
    (folder / "our_generators.py").write_text(code)
    register(folder, "ours", "fedcg.generators", name, "our_generators:one_layer")


def test_the_documented_generator_is_listed_trained_and_sent(folder: Path, tmp_path: Path) -> None:
    _, code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    install(folder, code)
    assert "one_layer" in data_of(run_fedcg("network", "list", "--json").output)["generators"]
    shown = data_of(run_fedcg("network", "show", "lenet5", "--generator", "one_layer", "--json").output)
    weights = 10 * 10 + (110 + 1) * 64 + (64 + 1) * 400  # embedding, hidden layer, features of 16 x 5 x 5
    assert shown["parts"]["generator"]["parameters"] == weights
    asked = ("--method", "fedcg", "--generator", "one_layer", "--set", "server_iterations=2", *TINY, *QUIET)
    done = run_fedcg("simulate", *asked, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    (record,) = data_of(done.stdout)["runs"]
    assert record["network"]["generator"] == "one_layer"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("import not_there", "our_generators:one_layer: ModuleNotFoundError: No module named 'not_there'"),
        ("def another(*asked): ...", "our_generators:one_layer: AttributeError"),
        ("def one_layer(shape): ...", "our_generators:one_layer can't be built and run: TypeError"),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return Linear((4, 4), n, nn.ReLU())",
            r"our_generators:one_layer makes features \[3, 4, 4\], not \[3, 16, 1, 1\]",
        ),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return Linear(s, n, nn.Tanh())",
            r"makes features from -0\.\d+ to .*, and the split's are non_negative: end it in a sigmoid",
        ),
        (
            f"{LINEAR}def one_layer(s, c, n, r): return nn.GRU(n, 16)",
            "no initial values are known for weight_ih_l0, .* give it a method reset",
        ),
    ],
)
def test_a_broken_generator_is_refused_with_the_name_of_its_entry(folder: Path, code: str, problem: str) -> None:
    install(folder, code)
    with pytest.raises(ExtensionError, match=problem):
        complete_spec(plan("fedcg", NetworkChoice(generator="one_layer", noise_dim=8)))


def test_a_broken_generator_ends_a_simulation_before_it_starts(folder: Path, tmp_path: Path) -> None:
    install(folder, "import not_there")
    done = run_fedcg("simulate", "--generator", "one_layer", *TINY, "--out", tmp_path / "out")
    assert done.exit_code == 2
    assert "our_generators:one_layer: ModuleNotFoundError" in " ".join(done.output.split())
    assert not (tmp_path / "out").exists()
