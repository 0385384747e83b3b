"""Imports torchvision, which is optional, when a backbone or a data set needs it.

torchvision's wheels carry an extension compiled for one build of torch. Beside another build (a CPU torch from elsewhere) it
does not load, and `import torchvision` then fails over two operators that nothing here uses. Their schemas are declared by
hand in that case, and models, data sets and transforms work; `torchvision.ops` that need the extension do not.
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
        LearningError: torchvision is not installed, or does not fit this torch; names what to install.
    """
    if importlib.util.find_spec("torchvision") is None:
        raise LearningError(f"this needs torchvision, which is not installed here; {INSTALL_VISION}")
    try:
        return importlib.import_module(f"torchvision.{submodule}")
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise LearningError(
                f"torchvision does not fit torch {torch.__version__}: {error}; {INSTALL_VISION}"
            ) from error
    _declare_schemas()
    return importlib.import_module(f"torchvision.{submodule}")


@functools.cache  # also because the schemas live only as long as this object
def _declare_schemas() -> torch.library.Library:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        library.define(schema)
    return library
