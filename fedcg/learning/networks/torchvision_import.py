"""Imports the optional torchvision when a backbone or a data set needs it.

torchvision's wheels include an extension compiled for one build of torch. With another build (such as a separate CPU
torch) it does not load, and `import torchvision` fails on two operators that are not used here. Their schemas are then
declared manually, so that models, data sets and transforms work. `torchvision.ops` that need the extension do not.
"""

import functools
import importlib
import importlib.util
from types import ModuleType

import torch

from fedcg.learning.errors import LearningError
from fedcg.learning.split_names import INSTALL_VISION

_SCHEMAS = tuple(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms"))


@functools.cache
def vision(submodule: str) -> ModuleType:
    """`torchvision.<submodule>`, e.g. "transforms" or "datasets".

    Raises:
        LearningError: torchvision is not installed or incompatible with this torch; names what to install.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise LearningError(f"this needs torchvision, which is not installed; {INSTALL_VISION}")
    try:
        return importlib.import_module(f"torchvision.{submodule}")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise LearningError(
                f"torchvision is incompatible with torch {torch.__version__}: {error}; {INSTALL_VISION}"
            ) from error
    _declare_schemas()
    return importlib.import_module(f"torchvision.{submodule}")


@functools.cache  # also keeps the schemas alive
def _declare_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
