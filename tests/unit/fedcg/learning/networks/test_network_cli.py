"""`fedcg network`: names, sizes, and errors that help."""

from pathlib import Path

import pytest

from fedcg.learning.networks import splits
from fedcg.learning.networks.gan import DISCRIMINATORS, GENERATORS
from fedcg.learning.networks.image_networks import IMAGE_SPLITS
from fedcg.learning.registry import method_names
from fedcg.learning.split_names import ALLOW_VARIABLE
from tests.support.commands import data_of, run_fedcg

PAGE = Path(__file__).parents[5] / "docs" / "how-to" / "add-a-network.md"


def output_of(*arguments: str) -> str:
    done = run_fedcg("network", *arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list_has_every_split_generator_and_discriminator() -> None:
    names = data_of(output_of("list", "--json"))
    assert {*splits.SPLITS, *IMAGE_SPLITS} <= set(names["splits"])
    assert (names["generators"], names["discriminators"]) == (sorted(GENERATORS), sorted(DISCRIMINATORS))
    assert "splits: lenet5, lenet5_relu, " in output_of("list")


def test_show_gives_the_published_sizes_of_lenet_and_what_each_method_sends() -> None:
    shown = data_of(output_of("show", "lenet5", "--generator", "conv", "--json"))
    assert shown["feature_shape"] == [16, 5, 5]
    assert (shown["feature_range"], shown["smallest_side"]) == ("unit", 16)
    parts = shown["parts"]
    assert parts["extractor"] == {"parameters": 2872, "parameter_bytes": 11_488, "tensor_bytes": 11_488}
    assert parts["generator"]["parameter_bytes"] == 3_562_896
    # batch norm after 512, 256 and 128 channels: mean and variance as float32, one int64 counter each
    assert parts["generator"]["tensor_bytes"] == 3_562_896 + 8 * (512 + 256 + 128) + 3 * 8
    assert set(shown["methods"]) == set(method_names()) - {"ppidsg", "analytic"}  # their networks are others
    both = parts["generator"]["tensor_bytes"] + parts["classifier"]["tensor_bytes"]
    assert shown["methods"]["fedcg"] == {"up": both, "down": both}
    assert shown["methods"]["local"] == {"up": 0, "down": 0}


def test_the_text_says_features_parts_and_methods() -> None:
    text = output_of("show", "lenet5_relu", "--image-size", "28", "--channels", "1", "--classes", "47")
    assert "lenet5_relu: features 16 x 4 x 4, >= 0; images from 16 pixels a side" in text
    # 256 x 120 + 120 x 84 + 84 x 47, and the biases 120 + 84 + 47: 44,999
    assert any(line.split()[:2] == ["classifier", "44,999"] for line in text.splitlines())


def test_a_method_that_refuses_the_networks_is_there_with_its_reason() -> None:
    reason = "halve input.height = 30 twice: choose a multiple of 4"
    assert reason in data_of(output_of("show", "image_small", "--image-size", "30", "--json"))["refusals"]["ppidsg"]
    (line,) = (line for line in output_of("show", "lenet5").splitlines() if line.split()[0] == "ppidsg")
    assert "not with these networks" in line
    assert "network.split must be image_small or image_paper" in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("lenet5", "--channels", "2"), "1 (grey) or 3"),
        (("lenet5", "--generator", "gru"), "no generator named 'gru'"),
        (("lenet 5",), "network.split: must be 1 to 200 letters, digits and signs of _.:@+-"),
    ],
)
def test_what_cannot_be_shown_is_explained(arguments: tuple[str, ...], said: str) -> None:
    done = run_fedcg("network", "show", *arguments)
    assert done.exit_code == 2
    said_there = " ".join(done.output.replace("│", " ").split())
    assert said in said_there
    assert "validation error" not in said_there


def test_a_function_that_a_person_typed_is_shown_uninstalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(ALLOW_VARIABLE, "")
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / "typed_networks.py").write_text(code)
    shown = data_of(
        output_of("show", "typed_networks:small_residual", "--channels", "1", "--image-size", "16", "--json")
    )
    assert shown["feature_shape"] == [8, 4, 4]
    # 1 x 8 x 9 + 8 weights and biases of the first convolution, 8 x 8 x 9 + 8 of the second, 2 x 8 of its batch norm
    assert shown["parts"]["extractor"]["parameters"] == 80 + 584 + 16
    splits._imported.cache_clear()
