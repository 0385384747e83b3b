"""Exports a personal model as one ONNX file (uint8 pixels or tensors in, logits and probabilities out), and compares it with the trained model.

Uses torch.

Preprocessing and softmax are in the graph. Class names, image form and origin are in the file's metadata.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import patch

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.build.preprocess_graph import add_preprocessing
from export.errors import ConversionError, VerificationError
from export.model.manifest import Verification
from export.model.runtime import (
    INPUT_NAME,
    NETWORK_INPUT,
    OUTPUT_NAMES,
    TASK_OUTPUT,
    Floats,
    Predictor,
    Sample,
    load_all,
    load_image,
)
from fedcg.errors import in_words
from fedcg.imaging import Pixels, fit_pixels
from fedcg.input_form import ImageForm, InputForm, TensorForm
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec
from fedcg.values import Value
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    import onnx

    from fedcg.learning.method import Weights


OPSET = 18  # both exporters write it without conversion, and TensorRT of JetPack 6 reads it
_TRACED_BATCH = 2  # the exporter would treat a batch of one as a constant
# Unsupported operators, an exporter that this torch no longer has, or a required package that is not installed.
_EXPORTER_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, ImportError)
_log = logging.getLogger(__name__)


class Served(nn.Module):
    """A personal model that returns logits and probabilities."""

    def __init__(self, model: nn.Module, *, has_classes: bool = True) -> None:
        super().__init__()
        self.model = model
        self.names = OUTPUT_NAMES if has_classes else TASK_OUTPUT

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Logits and probabilities, both [B, classes], for normalised [B, C, H, W] float32 images; without classes, the model's output."""
        logits = self.model(images)
        return (logits,) if self.names == TASK_OUTPUT else (logits, logits.softmax(dim=1))


class Normalised(nn.Module):
    """Normalises tensors for a network."""

    def __init__(self, form: TensorForm) -> None:
        super().__init__()
        self.form = form

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Normalised [B, *shape] float32 from [B, *shape] of the form's type."""
        return normalise(inputs, self.form)


def as_used(spec: FederationSpec, parts: Mapping[Part, Weights], before: nn.Module | None = None) -> nn.Module:
    """A personal model that takes tensors as in the data, or normalised images."""
    network = personal_model(spec, parts, before=before)
    return nn.Sequential(Normalised(spec.input), network) if isinstance(spec.input, TensorForm) else network


class Exported(Value):
    """The exported file's bytes, its opset, and the exporter."""

    content: bytes
    opset: int
    exporter: str


def export_personal(
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    out_path: Path,
    *,
    round_number: int = 0,
    before: nn.Module | None = None,
) -> Exported:
    """Write a personal model as ONNX with its preprocessing; the same weights give the same bytes.

    The first exporter that succeeds is used. torch's TorchScript exporter is tried first: the newer one imports torch's compiler, and
    its first call took 5 s instead of 0.1 s (torch 2.13, LeNet-5). TorchScript is deprecated, hence the second.

    Args:
        spec: the federation's spec.
        parts: weights of the parts that the method's model is made of; others are ignored.
        out_path: file to write.
        round_number: the round the weights come from.
        before: layer in front of the network, normalised images in and out; the file includes it.

    Raises:
        NetworkError: weights that do not fit the spec's networks.
        ConversionError: no exporter can write this network.
    """
    import onnx

    proto, exporter = _convert(Served(as_used(spec, parts, before), has_classes=bool(spec.classes)).eval(), spec)
    if isinstance(spec.input, ImageForm):
        proto = add_preprocessing(proto, spec.input)
    _describe(proto, spec, round_number)
    onnx.checker.check_model(proto, full_check=True)
    content = proto.SerializeToString(deterministic=True)
    out_path.write_bytes(content)
    opset = next(one.version for one in proto.opset_import if one.domain == "")
    return Exported(content, opset, exporter)


def _convert(model: Served, spec: FederationSpec) -> tuple[onnx.ModelProto, str]:
    dtype = torch.uint8 if isinstance(spec.input, TensorForm) and spec.input.dtype == "uint8" else torch.float32
    example = torch.zeros(_TRACED_BATCH, *spec.input.tensor_shape, dtype=dtype)
    failures = []
    for name, convert in (("torchscript", _with_torchscript), ("dynamo", _with_dynamo)):
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")  # both exporters warn about torch's own internals
                return convert(model, example), name
        except _EXPORTER_FAILURES as error:  # noqa: PERF203 - two exporters
            _log.info("the %s exporter cannot write %s: %s", name, spec.network.split, error)
            failures.append(f"{name}: {in_words(error)[:300]}")
    raise ConversionError(f"{spec.network.split} cannot be written as ONNX; " + "; ".join(failures))


def _with_torchscript(model: Served, example: torch.Tensor) -> onnx.ModelProto:
    import onnx

    # torch 2.7 to 2.13 prints the graph of a network that it can't write on stdout, regardless of its logging settings.
    silent = patch.object(torch._C, "_jit_onnx_log", create=True)  # noqa: SLF001
    with silent, tempfile.TemporaryDirectory(prefix="fedcg-export-") as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(
            model,
            (example,),
            path,
            dynamo=False,
            opset_version=OPSET,
            input_names=[NETWORK_INPUT],
            output_names=list(model.names),
            dynamic_axes={name: {0: "batch"} for name in (NETWORK_INPUT, *model.names)},
        )
        return onnx.load_model_from_string(path.read_bytes())


def _with_dynamo(model: Served, example: torch.Tensor) -> onnx.ModelProto:
    program = torch.onnx.export(
        model,
        (example,),
        dynamo=True,
        opset_version=OPSET,
        input_names=[NETWORK_INPUT],
        output_names=list(model.names),
        dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=1 << 16)},),
        optimize=False,  # onnxruntime optimises at loading; doing it here takes more than a second
        verbose=False,
    )
    assert program is not None
    return program.model_proto


def _describe(proto: onnx.ModelProto, spec: FederationSpec, round_number: int) -> None:
    import onnx

    proto.producer_name, proto.doc_string = "fedcg-edge", ""
    properties = {
        "classes": json.dumps(spec.classes),
        "input": spec.input.model_dump_json(),
        "takes": "pixels" if isinstance(spec.input, ImageForm) else "tensors",
        "federation": spec.federation,
        "round": str(round_number),
        "spec": spec.digest,
    }
    onnx.helper.set_model_props(proto, properties)


# float32 rounding in a few layers stays near 1e-6 of the largest logit; a wrong resize or normalisation causes far more than 1e-4.
LOGIT_TOLERANCE = 1e-4
MIN_TOP1_AGREEMENT = 0.995
NOISE_IMAGES = 64
OWN_SIZE_IMAGES = 8  # the model's resize takes a quarter of a second per photograph
_BATCH = 256


def verify(
    model_path: Path,
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    files: Sequence[Path | Sample],
    labels: Sequence[int],
    *,
    before: nn.Module | None = None,
) -> Verification:
    """Run both models on image files or tensors, and compare their outputs.

    The first files also go through the model's preprocessing, each at its original size. The logits must equal, bit for bit, those of
    the image after training's preprocessing.

    Args:
        model_path: the ONNX file.
        spec: the federation's spec.
        parts: weights of the personal model's parts.
        files: held-out image files, or tensors. Without any, random inputs are compared, without accuracy.
        labels: index of the right class per file.
        before: layer in front of the trained network.

    Raises:
        VerificationError: its preprocessing differs from training's, a logit differs by more than 1e-4 of the largest one (or of 1),
            fewer than 99.5 % of the images get the same class, or a value is not finite.
        InputError: a file that cannot be read as an image.
        ModelError: onnxruntime can't load the model.
    """
    if len(files) != len(labels):
        raise ValueError(f"{len(files)} files but {len(labels)} labels")
    content, threads, form = model_path.read_bytes(), torch.get_num_threads(), spec.input
    predictor = Predictor(content, form, spec.class_count, name=str(model_path), threads=threads)
    if isinstance(form, ImageForm):
        some = [file for file in files[:OWN_SIZE_IMAGES] if isinstance(file, Path)]
        _check_preprocessing(content, form, some, model_path)
    network = personal_model(spec, parts, before=before)
    pairs = [(_logits(network, inputs, form), predictor.run(inputs).logits) for inputs in _batches(files, form)]
    trained, exported = (
        np.concatenate([one.reshape(len(one), -1) for one in side]) for side in zip(*pairs, strict=True)
    )
    return _compare(trained, exported, np.asarray(labels, dtype=np.int64), model_path)


@torch.no_grad()
def _logits(network: nn.Module, inputs: Sequence[Sample], form: InputForm) -> Floats:
    """Outputs of the trained network: [B, classes] float32."""
    batch = np.stack(inputs)
    if isinstance(form, ImageForm):
        batch = np.ascontiguousarray(batch.transpose(0, 3, 1, 2))
    logits: Floats = network(normalise(torch.from_numpy(batch), form)).numpy()
    return logits


def _check_preprocessing(content: bytes, form: ImageForm, files: Sequence[Path], model_path: Path) -> None:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for name, own_size, fitted in _own_sizes(files, form):
        given, wanted = (session.run(["logits"], {INPUT_NAME: image[None]})[0] for image in (own_size, fitted))
        if not np.array_equal(given, wanted, equal_nan=True):
            raise VerificationError(
                f"{model_path}: resizes {name} differently from training; it is not installed. Install the newest "
                "onnxruntime for this machine"
            )


def _own_sizes(files: Sequence[Path], form: ImageForm) -> Iterator[tuple[str, Pixels, Pixels]]:
    """Images at their original size and at the form's size; the last one has random pixels."""
    for file in files:
        yield str(file), load_image(file, form, resize=False), load_image(file, form)
    noise = _noise((2 * form.height + 1, form.width // 2 + 1, form.channels))
    yield "an image of random pixels", noise, fit_pixels(noise.squeeze(-1) if form.channels == 1 else noise, form)


def _batches(files: Sequence[Path | Sample], form: InputForm) -> Iterator[Sequence[Sample]]:
    if not files:
        yield list(_noise((NOISE_IMAGES, *form.shape)) if form.dtype == "uint8" else _normal(form))
    for start in range(0, len(files), _BATCH):
        yield load_all(files[start : start + _BATCH], form)


def _noise(shape: tuple[int, ...]) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _normal(form: InputForm) -> Floats:
    """Random tensors that normalise to mean 0 and deviation 1."""
    numbers = np.random.default_rng(0).standard_normal((NOISE_IMAGES, *form.shape))
    mean, std = (
        np.reshape(of or one, (-1, *[1] * (len(form.shape) - 1))) for of, one in ((form.mean, 0.0), (form.std, 1.0))
    )
    tensors: Floats = (numbers * std + mean).astype(np.float32)
    return tensors


def _compare(trained: Floats, exported: Floats, labels: np.ndarray, model_path: Path) -> Verification:
    if not (np.isfinite(trained).all() and np.isfinite(exported).all()):
        raise VerificationError(f"{model_path}: a logit is not a finite number; train again from the last good round")
    difference = float(np.abs(trained - exported).max())
    bound = LOGIT_TOLERANCE * max(1.0, float(np.abs(trained).max()))
    agreement = float((trained.argmax(1) == exported.argmax(1)).mean())
    if difference > bound or agreement < MIN_TOP1_AGREEMENT:
        raise VerificationError(
            f"{model_path}: differs from the trained model: logits differ by up to {difference:.2g} (allowed {bound:.2g}), "
            f"{agreement:.1%} of {len(trained)} inputs get the same class (required {MIN_TOP1_AGREEMENT:.1%}); it is not installed"
        )
    from_files = len(labels) > 0
    return Verification(
        images=len(trained),
        source="files" if from_files else "noise",
        max_abs_difference=difference,
        top1_agreement=agreement,
        accuracy_torch=float((trained.argmax(1) == labels).mean()) if from_files else None,
        accuracy_onnx=float((exported.argmax(1) == labels).mean()) if from_files else None,
    )
