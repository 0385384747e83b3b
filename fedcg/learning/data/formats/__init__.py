"""Data sets that come as arrays in a few files: IDX, CIFAR batches, `.npz`. Torch-free; every size is bounded before memory is taken."""

from fedcg.learning.data.formats.arrays import ArrayData, LabelledImages
from fedcg.learning.data.formats.detect import dataset_name, installed_dataset, is_array_source, read_arrays, stamp

__all__ = [
    "ArrayData",
    "LabelledImages",
    "dataset_name",
    "installed_dataset",
    "is_array_source",
    "read_arrays",
    "stamp",
]
