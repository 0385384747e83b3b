"""`fedcg network`: names and sizes."""

from pathlib import Path

from fedcg.learning.networks import splits
from fedcg.learning.networks.gan import DISCRIMINATORS, GENERATORS
from fedcg.learning.networks.image_networks import IMAGE_SPLITS
from tests.support.commands import data_of, run_fedcg


def output_of(*arguments: str) -> str:
    done = run_fedcg("network", *arguments)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_list_has_every_split_generator_and_discriminator() -> None:
    names = data_of(output_of("list", "--json"))
    assert {*splits.SPLITS, *IMAGE_SPLITS} <= set(names["splits"])
    assert (names["generators"], names["discriminators"]) == (sorted(GENERATORS), sorted(DISCRIMINATORS))
    assert "splits: lenet5, lenet5_relu, " in output_of("list")


def test_the_reference_has_the_published_size_of_lenet_and_counts_buffers() -> None:
    page = (Path(__file__).parents[5] / "docs" / "reference" / "networks.md").read_text()
    assert "| `lenet5` | extractor | 11,488 |" in page  # 2,872 parameters
    # batch norm after 512, 256 and 128 channels: mean and variance as float32, one int64 counter each
    assert f"| `conv` | generator | {3_562_896 + 8 * (512 + 256 + 128) + 3 * 8:,} |" in page
