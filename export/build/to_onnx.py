"""A personal model as one ONNX file: uint8 pixels in, logits and probabilities out.

Preprocessing and the softmax are in the graph; class names, image form and origin are in the file's metadata. Uses torch.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from export.build.preprocess_graph import add_preprocessing
from export.errors import ConversionError
from export.model.manifest import Takes
from export.model.runtime import NETWORK_INPUT, OUTPUT_NAMES
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    import onnx

    from fedcg.learning.method import Weights

OPSET = 18  # what both exporters write without conversion, and what the TensorRT of JetPack 6 reads
_TRACED_BATCH = 2  # a batch of one would be taken for a constant
# Unsupported operators, an exporter that this torch no longer has, a package that it needs and that is not installed.
_EXPORTER_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
_log = logging.getLogger(__name__)


class Served(nn.Module):
    """A personal model with the probabilities beside its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and probabilities, both [B, classes], of [B, C, H, W] float32 images, normalised."""
        logits = self.model(images)
        return logits, logits.softmax(dim=1)


@dataclass(frozen=True)
class Exported:
    """What was written: the file's bytes, its opset, and the exporter that made it."""

    content: bytes
    opset: int
    exporter: str


def export_personal(
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    out_path: Path,
    *,
    round_number: int = 0,
    takes: Takes = "pixels",
    before: nn.Module | None = None,
) -> Exported:
    """Write a personal model as ONNX; the same weights give the same bytes.

    The first exporter that can is used. torch's TorchScript exporter comes first: the newer one imports torch's compiler and took
    5 s at its first call where this one took 0.1 s (torch 2.13, LeNet-5). TorchScript is deprecated, hence the second.

    Args:
        spec: the federation's spec.
        parts: weights of the parts that the method's model is made of; others are ignored.
        out_path: file to write.
        round_number: the round the weights come from.
        takes: pixels of any size, or normalised ones at the network's size: then there is no preprocessing in the file.
        before: what images go through before the network, normalised ones in and out; it is in the file.

    Raises:
        NetworkError: weights that do not fit the spec's networks.
        ConversionError: no exporter can write this network.
    """
    import onnx

    model = Served(personal_model(spec, parts, before=before)).eval()
    proto, exporter = _convert(model, spec)
    if takes == "pixels":
        proto = add_preprocessing(proto, spec.image)
    _describe(proto, spec, round_number, takes)
    onnx.checker.check_model(proto, full_check=True)
    content = proto.SerializeToString(deterministic=True)
    out_path.write_bytes(content)
    opset = next(one.version for one in proto.opset_import if one.domain == "")
    return Exported(content, opset, exporter)


def _convert(model: Served, spec: FederationSpec) -> tuple[onnx.ModelProto, str]:
    form = spec.image
    example = torch.zeros(_TRACED_BATCH, form.channels, form.height, form.width)
    failures = []
    for name, convert in (("torchscript", _with_torchscript), ("dynamo", _with_dynamo)):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # both exporters warn about torch's own internals
                return convert(model, example), name
        except _EXPORTER_FAILURES as error:  # noqa: PERF203 - two exporters
            _log.warning("the %s exporter cannot write %s: %s", name, spec.network.split, error)
            failures.append(f"{name}: {error}")
    raise ConversionError(f"{spec.network.split} cannot be written as ONNX; " + "; ".join(failures))


def _with_torchscript(model: Served, example: torch.Tensor) -> onnx.ModelProto:
    import onnx

    with tempfile.TemporaryDirectory(prefix="fedcg-export-") as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            model,
            (example,),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=[NETWORK_INPUT],
            output_names=list(OUTPUT_NAMES),
            dynamic_axes={name: {0: "batch"} for name in (NETWORK_INPUT, *OUTPUT_NAMES)},
        )
        return onnx.load_model_from_string(path.read_bytes())


def _with_dynamo(model: Served, example: torch.Tensor) -> onnx.ModelProto:
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        opset_version=OPSET,
        input_names=[NETWORK_INPUT],
        output_names=list(OUTPUT_NAMES),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1 << 16)},),
        optimize=False,  # onnxruntime optimises when it loads; here it costs more than a second
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def _describe(proto: onnx.ModelProto, spec: FederationSpec, round_number: int, takes: Takes) -> None:
    import onnx

    form = spec.image
    proto.producer_name, proto.doc_string = "fedcg-edge", ""
    properties = {
        "classes": json.dumps(spec.classes),
        "image": form.model_dump_json(),
        "takes": takes,
        "federation": spec.federation,
        "round": str(round_number),
        "spec": spec.digest,
    }
    onnx.helper.set_model_props(proto, properties)
