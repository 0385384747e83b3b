"""Reading data sets that the user's code made."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from fedcg.learning.data.datasets import read_dataset
from fedcg.learning.errors import DataError

X = torch.arange(24, dtype=torch.float32).view(4, 2, 3)
Y = [0, 1, 1, 0]
PICTURE = Image.new("RGB", (5, 4), (255, 0, 10))


@pytest.mark.parametrize(
    ("data", "dtype", "shape"),
    [
        (TensorDataset(X, torch.tensor(Y)), torch.float32, (2, 3)),
        ((X.numpy().astype(np.float64), np.array(Y)), torch.float32, (2, 3)),
        ([(row.byte(), label) for row, label in zip(X, Y, strict=True)], torch.uint8, (2, 3)),
        ([{"img": PICTURE, "label": label} for label in Y], torch.uint8, (3, 4, 5)),
        ([(3 * label, label) for label in Y], torch.float32, ()),
    ],
)
def test_data_sets_of_any_kind_become_tensors(data: object, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    read = read_dataset(data, ["a", "b"], "client x: train")
    assert (read.images.dtype, tuple(read.images.shape), read.labels.tolist()) == (dtype, (4, *shape), Y)


def test_numbers_are_read_as_they_are() -> None:
    assert torch.equal(read_dataset(TensorDataset(X, torch.tensor(Y)), "ab", "x").images, X)
    assert read_dataset([(PICTURE, 0)], "ab", "x").images[0, :, 0, 0].tolist() == [255, 0, 10]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([(1.0, 0, "more")], "sample 0 is 3 things, not (x, y)"),
        ([(1.0, 0), 7], "sample 1 is a int, not (x, y)"),
        ([(1.0, 0), (float("nan"), 1)], "sample 1 has a number that is not finite"),
        ([(1.0, 0), (1.0, 2)], "sample 1 has label 2; with 2 classes it is 0 to 1"),
        ([(1.0, 0.5)], "not one integer per sample"),
        ([([1.0], 0), ([1.0, 2.0], 0)], "sample 1 is float64 [2], but sample 0 is float32 [1]"),
        ([(X[0], 0), (X[1].byte(), 0)], "sample 1 is uint8 [2, 3], but sample 0 is float32 [2, 3]"),
        ([("text", 0)], "does not hold numbers"),
        ([{"text": 1, "label": 0}], "has the columns text, label, but needs one called image"),
        ((X, np.array([1])), "4 inputs and 1 labels"),
        ([], "has no samples"),
        (iter([(1.0, 0)]), "list(...)"),
    ],
)
def test_what_cannot_be_trained_on_names_the_sample(data: object, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read_dataset(data, ["a", "b"], "client x: train")
    assert str(caught.value).startswith("client x: train")
    assert words in str(caught.value)
