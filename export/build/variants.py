"""Variants of an exported model: tried on the device that will run them, kept only if they are faster there, and checked on files that were not used for the choice.

A variant is kept if it is faster than the float32 model on this machine and loses at most `BUDGET` of accuracy on held-out images. Timing uses the execution providers that will serve it. The manifest records measurements and reasons. Needs the package `onnx`, not torch.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from export.build.preprocess_graph import on_network
from export.errors import ConversionError, ExportError, ModelError
from export.model import runtime
from export.model.manifest import (
    Manifest,
    ModelFile,
    Variant,
    VariantCheck,
    VariantName,
    digest,
    read_manifest,
    read_model,
    write_manifest,
)
from fedcg.values import Value

if TYPE_CHECKING:
    import onnx


BUDGET = 0.005  # largest accuracy loss of a variant, as a share
SPEED_UP = 1.05  # a smaller gain may be measurement noise
CALIBRATION_IMAGES = 64  # onnxruntime keeps all layer outputs of each image
TIMING_S = 1.0
TIMING_ROUNDS = (20, 400)
_WARM_UP = 3


class HeldOut(Value):
    """Inputs that evaluate variants.

    Attributes:
        images: each in the model's form, used neither in training nor in calibration.
        labels: index of the right class per image.
        calibration: images to calibrate int8; labels are not needed.
    """

    images: Sequence[runtime.Sample]
    labels: Sequence[int]
    calibration: Sequence[runtime.Sample]

    def __post_init__(self) -> None:
        if not self.images or not self.calibration:
            raise ExportError("variants need held-out images, and others for calibration; some are missing")
        if len(self.images) != len(self.labels):
            raise ValueError(f"{len(self.images)} images but {len(self.labels)} labels")


def add_variants(directory: Path, held_out: HeldOut, *, threads: int = 0) -> Manifest:
    """Try variants of the model in a directory, add those that are worth keeping, and name the one to serve in its manifest.

    Args:
        directory: a model and its manifest, not in use yet.
        held_out: images for evaluation and calibration.
        threads: threads of one prediction, as in service; 0 lets onnxruntime choose.

    Returns:
        The manifest as written.

    Raises:
        ModelError: the directory contains no model that runs.
    """
    manifest = read_manifest(directory)
    plain = read_model(directory, manifest, manifest.model)
    calibration = [
        runtime.network_input(one[None], manifest.input) for one in held_out.calibration[:CALIBRATION_IMAGES]
    ]
    candidates, refused = [_load("fp32", plain, manifest, threads)], []
    for name, convert in _CONVERSIONS.items():
        try:
            candidates.append(_load(name, convert(plain, calibration), manifest, threads))
        except (ConversionError, ModelError) as error:  # noqa: PERF203 - three forms
            refused.append(Variant(name=name, reason=str(error)[:500]))
    judged = _judge(candidates, held_out, manifest.model)
    for candidate, variant in zip(candidates, judged, strict=True):
        if variant.file is not None and variant.file != manifest.model:
            (directory / variant.file.name).write_bytes(candidate.content)
    unchecked = manifest.verification.model_copy(update={"variants": ()})
    manifest = manifest.model_copy(
        update={"variants": (*judged, *refused), "serves": best(judged).name, "verification": unchecked}
    )
    write_manifest(directory, manifest)
    return manifest


class _Candidate(Value):
    name: VariantName
    content: bytes
    predictor: runtime.Predictor


def _load(name: VariantName, content: bytes, manifest: Manifest, threads: int) -> _Candidate:
    return _Candidate(name, content, runtime.predictor_of(manifest, Variant(name=name), content, threads=threads))


def best(judged: Sequence[Variant]) -> Variant:
    """The fastest kept variant."""
    return min((one for one in judged if one.file is not None), key=lambda one: one.latency_ms or 0.0)


def _judge(candidates: Sequence[_Candidate], held_out: HeldOut, plain: ModelFile) -> list[Variant]:
    latencies = _latencies([one.predictor for one in candidates], held_out.images)
    labels = np.asarray(held_out.labels)
    predicted = [one.predictor.run(held_out.images).logits.argmax(axis=1) for one in candidates]
    right = [float((classes == labels).mean()) for classes in predicted]
    judged = []
    for candidate, latency, classes, accuracy in zip(candidates, latencies, predicted, right, strict=True):
        speed_up, lost = latencies[0] / latency, right[0] - accuracy
        is_plain = candidate.name == "fp32"
        against = "" if is_plain else _objection(speed_up, lost)
        figures = f"{speed_up:.2f} times as fast as fp32, {lost:.1%} of accuracy lost"
        kept = plain if is_plain else _file(candidate, plain.opset)
        judged.append(
            Variant(
                name=candidate.name,
                file=None if against else kept,
                latency_ms=round(latency, 4),
                accuracy=accuracy,
                top1_agreement=float((classes == predicted[0]).mean()),
                images=len(labels),
                reason=against or ("the model as exported" if is_plain else figures),
            )
        )
    return judged


def _objection(speed_up: float, lost: float) -> str:
    """Why a variant is not kept; empty if it is kept."""
    if lost > BUDGET:
        return f"loses {lost:.1%} of accuracy; at most {BUDGET:.1%} is allowed"
    if speed_up < SPEED_UP:
        return f"{speed_up:.2f} times as fast as fp32 on this machine; at least {SPEED_UP} is required"
    return ""


def _latencies(predictors: Sequence[runtime.Predictor], images: Sequence[runtime.Sample]) -> list[float]:
    """Median milliseconds of one prediction at batch 1. Predictors take turns, so that other load affects all equally."""
    taken: list[list[float]] = [[] for _ in predictors]
    began, (least, most) = time.perf_counter(), TIMING_ROUNDS
    for turn in range(_WARM_UP + most):
        for predictor, seconds in zip(predictors, taken, strict=True):
            start = time.perf_counter()
            predictor.run([images[turn % len(images)]])
            seconds.append(time.perf_counter() - start)
        if turn >= _WARM_UP + least and time.perf_counter() - began > TIMING_S:
            break
    return [statistics.median(seconds[_WARM_UP:]) * 1e3 for seconds in taken]


def _file(candidate: _Candidate, opset: int) -> ModelFile:
    content = candidate.content
    return ModelFile(name=f"model-{candidate.name}.onnx", sha256=digest(content), size=len(content), opset=opset)


def _converted(content: bytes, convert: Callable[[onnx.ModelProto], onnx.ModelProto]) -> bytes:
    """Convert a model's network without the converter's warnings and log lines; its preprocessing stays exact."""
    import onnx

    root, level = logging.getLogger(), logging.getLogger().level
    try:
        root.setLevel(logging.ERROR)  # the quantiser logs to the root logger
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = on_network(onnx.load_model_from_string(content), convert)
        return bytes(model.SerializeToString(deterministic=True))
    except Exception as error:  # the converters raise arbitrary exceptions
        raise ConversionError(f"can't be created: {type(error).__name__}: {error}") from error
    finally:
        root.setLevel(level)


def _halved(network: onnx.ModelProto) -> onnx.ModelProto:
    """Weights and arithmetic of the network in float16; input and outputs keep their types."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    halved: onnx.ModelProto = convert_float_to_float16(network, keep_io_types=True)
    return halved


def _quantised(network: onnx.ModelProto, calibration: Sequence[runtime.Sample]) -> onnx.ModelProto:
    """Static quantisation of the network in QDQ form, weights per channel, ranges from local images."""
    import onnx

    with tempfile.TemporaryDirectory(prefix="fedcg-int8-") as folder:
        from onnxruntime.quantization import QuantFormat, QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        plain, ready, done = (Path(folder) / name for name in ("plain.onnx", "ready.onnx", "int8.onnx"))
        inputs = ({runtime.NETWORK_INPUT: image} for image in calibration)
        plain.write_bytes(network.SerializeToString())
        quant_pre_process(plain, ready, skip_symbolic_shape=True)
        quantize_static(
            ready,
            done,
            SimpleNamespace(get_next=partial(next, inputs, None)),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        return onnx.load_model_from_string(done.read_bytes())


_CONVERSIONS: dict[VariantName, Callable[[bytes, Sequence[runtime.Sample]], bytes]] = {
    "fp16": lambda content, _: _converted(content, _halved),
    "int8": lambda content, calibration: _converted(content, lambda network: _quantised(network, calibration)),
}


def verify_variants(
    directory: Path, files: Sequence[Path | runtime.Sample], labels: Sequence[int], *, threads: int = 0
) -> Manifest:
    """Compare each kept variant with the model as exported, from the encoded files, and record the result in the manifest.

    A variant that loses more than `BUDGET` on these files is removed.

    Args:
        directory: a model, its variants and manifest, not in use yet.
        files: held-out image files, or tensors; if empty, nothing is compared.
        labels: index of the right class per file.
        threads: threads of one prediction; 0 lets onnxruntime choose.

    Returns:
        The manifest as written.

    Raises:
        InputError: a file that cannot be read as an image.
        ModelError: a variant that does not run.
    """
    manifest = read_manifest(directory)
    tried = [one for one in manifest.variants if one.file is not None and one.name != "fp32"]
    if not files or not tried:
        return manifest
    pictures, right = runtime.load_all(files, manifest.input), np.asarray(labels)
    plain = _logits(directory, manifest, Variant(name="fp32", file=manifest.model), pictures, threads)
    checks = {
        one.name: _compared(one, _logits(directory, manifest, one, pictures, threads), plain, right) for one in tried
    }
    variants = tuple(_after_check(one, checks.get(one.name)) for one in manifest.variants)
    verification = manifest.verification.model_copy(update={"variants": tuple(checks.values())})
    verified = manifest.model_copy(
        update={"variants": variants, "serves": best(variants).name, "verification": verification}
    )
    for gone in set(manifest.files) - set(verified.files):
        (directory / gone.name).unlink()
    write_manifest(directory, verified)
    return verified


def _logits(
    directory: Path, manifest: Manifest, form: Variant, pictures: Sequence[runtime.Sample], threads: int
) -> runtime.Floats:
    content = read_model(directory, manifest, form.file)
    return runtime.predictor_of(manifest, form, content, threads=threads).run(pictures).logits


def _compared(form: Variant, logits: runtime.Floats, plain: runtime.Floats, right: np.ndarray) -> VariantCheck:
    return VariantCheck(
        name=form.name,
        accuracy=float((logits.argmax(axis=1) == right).mean()),
        accuracy_fp32=float((plain.argmax(axis=1) == right).mean()),
        top1_agreement=float((logits.argmax(axis=1) == plain.argmax(axis=1)).mean()),
        max_abs_difference=float(np.abs(logits - plain).max()),
        images=len(right),
    )


def _after_check(form: Variant, check: VariantCheck | None) -> Variant:
    if check is None or check.accuracy_fp32 - check.accuracy <= BUDGET:
        return form
    reason = (
        f"loses {check.accuracy_fp32 - check.accuracy:.1%} of accuracy on {check.images} held-out files that were not used "
        f"to choose it; at most {BUDGET:.1%} is allowed"
    )
    return form.model_copy(update={"file": None, "reason": reason})
