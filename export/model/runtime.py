"""Runs an exported model with onnxruntime and numpy, from a file of an image or tensor to class names. Doesn't import torch.

Owns decoding to the model's form (with `fedcg.imaging` and `fedcg.npy_arrays`, as in training), the choice of execution providers (TensorRT, then CUDA, then the CPU), and `Model`.
"""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime

from export.errors import InputError, ManifestError
from export.model.manifest import Accept, Manifest, Variant, read_model, read_signed
from export.model.versions import engines_of, resolve
from fedcg.errors import NOT_FOUND
from fedcg.imaging import MAX_PIXELS, ImageError, Pixels, decode_image, read_file
from fedcg.input_form import ImageForm, InputForm, TensorForm, taken_in_words
from fedcg.npy_arrays import NpyError, read_npy
from fedcg.values import Value

Sample = npt.NDArray[Any]
"""One input of a model: an image as [height, width, channels] uint8, or a tensor of the form's shape and type."""


def load_image(source: Path | bytes, form: ImageForm, max_pixels: int = MAX_PIXELS, *, resize: bool = True) -> Pixels:
    """Decode one image and convert it to a model's form.

    Args:
        source: a file, or the bytes of one.
        form: the model's mode and size.
        max_pixels: larger images are rejected by their header, before decoding.
        resize: resize to the form's size; otherwise the image keeps its size.

    Returns:
        [height, width, channels] uint8, as a separate copy.

    Raises:
        InputError: no such file, not an image of a supported format, damaged, or over the pixel limit.
    """
    name, content = (str(source), _read_bytes(source)) if isinstance(source, Path) else ("image", source)
    try:
        return decode_image(content, form, max_pixels, resize=resize)
    except ImageError as error:
        raise InputError(name, str(error)) from error


class TooManyError(NpyError):
    """More tensors than the limit for one call."""


def read_tensors(content: bytes, form: TensorForm, most: int | None = None) -> Sample:
    """Tensors from the bytes of an npy file: one, or a batch.

    Args:
        content: the whole file.
        form: shape and element type; other types are cast if that loses nothing.
        most: maximum number of tensors; None for any.

    Returns:
        [N, *shape] of the form's type, finite.

    Raises:
        NpyError: no such file, another shape or type, or numbers that are not finite.
        TooManyError: more than `most`; raised before reading them.
    """

    def size_of(shape: tuple[int, ...], kind: np.dtype[Any]) -> int:
        if kind.kind not in "uif" or not np.can_cast(kind, form.dtype, "safe"):
            raise NpyError(f"contains numbers of type {kind}; the model takes {taken_in_words(form)}")
        if shape != form.shape and (shape[1:] != form.shape or shape[0] == 0):
            raise NpyError(f"has the shape {list(shape)}; the model takes {taken_in_words(form)}, or several of them")
        if most is not None and shape != form.shape and shape[0] > most:
            raise TooManyError(f"has {shape[0]} tensors; the limit is {most}")
        return math.prod(shape) * kind.itemsize

    batch = read_npy(io.BytesIO(content), len(content), size_of).reshape(-1, *form.shape)
    batch = np.ascontiguousarray(batch, dtype=form.dtype)
    check_finite(batch)
    return batch


def check_finite(batch: Sample) -> None:
    """Check that all numbers of inputs [N, ...] are finite.

    Raises:
        NpyError: names the first input that is not finite.
    """
    if batch.dtype.kind == "f" and not np.isfinite(batch).all():
        finite = np.isfinite(batch).reshape(len(batch), -1).all(1)
        raise NpyError(f"contains numbers that are not finite, in tensor {int(finite.argmin())}")


def load_inputs(source: Path | bytes | Sample, form: InputForm, max_pixels: int = MAX_PIXELS) -> Sequence[Sample]:
    """The inputs of a source: one image, or the tensors of an `.npy` or `.npz`; an array is one input.

    Raises:
        InputError: as `load_image`, or no tensors of this form.
    """
    if isinstance(source, np.ndarray):
        return [source]
    if isinstance(form, ImageForm):
        return [load_image(source, form, max_pixels)]
    name = "tensors" if isinstance(source, bytes) else str(source)
    try:
        if isinstance(source, Path) and source.suffix == ".npz":
            return labelled_tensors(source, form)[0]
        return list(read_tensors(source if isinstance(source, bytes) else _read_bytes(source), form))
    except NpyError as error:
        raise InputError(name, str(error)) from error


def labelled_tensors(
    path: Path, form: TensorForm, classes: Sequence[str] | None = None
) -> tuple[list[Sample], list[int]]:
    """The tensors of an `.npz` for training and their class indices; only the test part, if it has one.

    Args:
        path: the file.
        form: of one tensor.
        classes: the model's class names; None to ignore labels and return all tensors.

    Raises:
        InputError: not such a file, damaged, tensors of another form, or a label without a class.
    """
    from fedcg.learning.data.array_files import read_npz, read_unlabelled  # imported only for these files
    from fedcg.learning.errors import DataError

    if not path.is_file():  # reading a FIFO may block forever
        is_there = path.exists()
        reason = "not a regular file" if is_there else "no such file"
        raise InputError(str(path), reason, exit_code=None if is_there else NOT_FOUND)
    try:
        if classes is None:
            return list(read_unlabelled(path, form)), []
        data = read_npz(path, form)
    except DataError as error:
        raise InputError(str(path), str(error).removeprefix(f"{path}: ")) from error
    part = data.test or data.train
    if int(part.labels.max()) >= len(classes):
        raise InputError(str(path), f"label {int(part.labels.max())}; the model's labels are 0 to {len(classes) - 1}")
    return list(part.images), part.labels.tolist()


def load_all(sources: Sequence[Path | bytes | Sample], form: InputForm) -> list[Sample]:
    """The inputs of arrays, or of files with one input each."""
    return [one for source in sources for one in load_inputs(source, form)]


def _read_bytes(path: Path) -> bytes:
    if not path.exists() and not path.is_symlink():
        raise InputError(str(path), "no such file", exit_code=NOT_FOUND)
    if path.is_dir():
        raise InputError(str(path), "a folder without images")
    try:
        return read_file(path)
    except (ImageError, OSError) as error:
        raise InputError(str(path), getattr(error, "strerror", None) or str(error)) from error


def normalise(images: Pixels, form: ImageForm) -> npt.NDArray[np.float32]:
    """`(x / 255 - mean) / std` per channel, as in training: the input of a model without preprocessing.

    Args:
        images: [N, height, width, channels] uint8.
        form: with mean and std.

    Returns:
        [N, channels, height, width] float32.
    """
    mean, std = (np.asarray(values, dtype=np.float32).reshape(1, -1, 1, 1) for values in (form.mean, form.std))
    levels = np.ascontiguousarray(images.transpose(0, 3, 1, 2)).astype(np.float32)
    normalised: npt.NDArray[np.float32] = (levels / np.float32(255) - mean) / std
    return normalised


def network_input(batch: Sample, form: InputForm) -> Sample:
    """Inputs [N, ...] for a model without preprocessing: normalised images, or unchanged tensors."""
    return normalise(batch, form) if isinstance(form, ImageForm) else batch


TENSORRT = "TensorrtExecutionProvider"
CPU = "CPUExecutionProvider"
PROVIDERS = (TENSORRT, "CUDAExecutionProvider", CPU)  # best first
Provider = str | tuple[str, dict[str, str]]


def available_providers() -> tuple[str, ...]:
    """This onnxruntime's execution providers, best first: TensorRT, CUDA, CPU."""
    present = onnxruntime.get_available_providers()
    return tuple(name for name in PROVIDERS if name in present)


def session_providers(engines: Path | None) -> list[Provider]:
    """The available providers, best first, in the form that an onnxruntime session expects.

    Args:
        engines: folder for this model's TensorRT engines only, created on demand; None to rebuild them at each start.
    """
    options: dict[str, str] = {}
    names = available_providers()
    if TENSORRT in names and engines is not None:
        try:
            engines.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            log.warning("TensorRT engines are not cached; each start rebuilds them: %s", error)
        else:
            options |= {"trt_engine_cache_enable": "True", "trt_engine_cache_path": str(engines)}
            options |= {"trt_timing_cache_enable": "True", "trt_timing_cache_path": str(engines)}
    return [(name, options) if name == TENSORRT else name for name in names]


def in_words(names: Sequence[str]) -> str:
    """Readable names of providers, in order of preference: "TensorRT > CUDA > CPU"."""
    return " > ".join(name.removesuffix("ExecutionProvider").replace("Tensorrt", "TensorRT") for name in names)


Floats = npt.NDArray[np.float32]

INPUT_NAME = "images"  # decoded pixels, for a model with preprocessing
NETWORK_INPUT = "input"  # the network's input, for a model without preprocessing
OUTPUT_NAMES = ("logits", "probabilities")
TASK_OUTPUT = ("output",)  # for a model without classes
BATCH = 256
_LOG_ERRORS_ONLY = 3
log = logging.getLogger(__name__)


class Guess(Value):
    """A class name and its probability in [0, 1]."""

    label: str
    probability: float


class Outputs(Value):
    """The model's outputs for N images: `logits` and `probabilities`, both [N, C] float32. Without classes, both are the same [N, ...]."""

    logits: Floats
    probabilities: Floats


class Predictor:
    """An ONNX model in onnxruntime, whose inputs and outputs are checked against a form and a number of classes.

    Args:
        content: bytes of the ONNX file.
        form: of the inputs.
        class_count: C, the number of classes; 0 for another task, with outputs of any shape.
        name: the file's name in errors.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        engines: folder for TensorRT engines, if TensorRT is available; None not to cache them.

    Raises:
        ManifestError: onnxruntime can't load the model, or its inputs or outputs don't match.
    """

    def __init__(
        self,
        content: bytes,
        form: InputForm,
        class_count: int,
        *,
        name: str = "model",
        threads: int = 0,
        engines: Path | None = None,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _LOG_ERRORS_ONLY
        options.intra_op_num_threads = threads
        # All images of a batch have the network's size. With these fixed, onnxruntime removes the resize from the graph.
        if isinstance(form, ImageForm):
            options.add_free_dimension_override_by_name("height", form.height)
            options.add_free_dimension_override_by_name("width", form.width)
        asked = session_providers(engines)
        try:
            session = onnxruntime.InferenceSession(content, options, providers=asked)
        except Exception as error:  # onnxruntime's own exception types are not public
            raise ManifestError(f"{name}: onnxruntime cannot load it ({error})") from error
        self.name = name
        self.shape: tuple[int, ...] = form.shape
        self.dtype = np.dtype(form.dtype)
        self.class_count = class_count
        self._outputs = OUTPUT_NAMES if class_count else TASK_OUTPUT
        self._form = form
        self._input = INPUT_NAME if isinstance(form, ImageForm) else NETWORK_INPUT
        self._session = session
        self._check()

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return tuple(self._session.get_providers())

    def run(self, inputs: Sequence[Sample] | Sample) -> Outputs:
        """Logits and probabilities of inputs.

        Args:
            inputs: each as returned by `load_inputs`.

        Raises:
            ValueError: an input of another shape or element type, or a tensor with numbers that are not finite.
        """
        for position, one in enumerate(inputs):
            if one.shape != self.shape or one.dtype != self.dtype:
                raise ValueError(
                    f"{self._form.kind} {position} is {one.dtype} {one.shape}; the model takes {self.dtype} {self.shape}"
                )
        found: list[list[Floats]] = (
            [] if len(inputs) else [[np.empty((0, self.class_count), np.float32)] * len(self._outputs)]
        )
        for start in range(0, len(inputs), BATCH):
            rows = slice(start, start + BATCH)
            batch = np.stack(list(inputs[rows]))
            check_finite(batch)
            found.append(self._session.run(list(self._outputs), {self._input: batch}))
        sides = [np.concatenate(side) for side in zip(*found, strict=True)]
        return Outputs(sides[0], sides[-1])

    def _check(self) -> None:
        """Check inputs and outputs, and the form in the file's metadata: shapes are not enough, since a model takes pixels of any size."""
        inputs = [(one.name, one.type, tuple(one.shape[1:])) for one in self._session.get_inputs()]
        outputs = [(one.name, one.type, tuple(one.shape[1:])) for one in self._session.get_outputs()]
        kind = "float" if self.dtype == np.float32 else "uint8"
        taken = (self._input, f"tensor({kind})", self.shape)
        given = [(self.class_count,)] * 2 if self.class_count else [outputs[0][2] if outputs else ()]
        expected = ([taken], [(name, "tensor(float)", shape) for name, shape in zip(self._outputs, given, strict=True)])
        if (inputs, outputs) != expected:
            raise ManifestError(
                f"{self.name}: takes {inputs} and gives {outputs}; expected {expected[0]} and {expected[1]}"
            )
        wanted = self._form.model_dump(mode="json")
        stated = self._session.get_modelmeta().custom_metadata_map.get("input", "")
        try:
            is_right = json.loads(stated) == wanted
        except ValueError:
            is_right = False
        if not is_right:
            raise ManifestError(f"{self.name}: is for inputs {stated[:300] or 'of no stated form'}; expected {wanted}")


def predictor_of(
    manifest: Manifest, form: Variant, content: bytes, *, name: str = "", threads: int = 0, engines: Path | None = None
) -> Predictor:
    """One variant of a model in onnxruntime.

    Args:
        manifest: the model's.
        form: the variant.
        content: bytes of the variant's file.
        name: its name in errors; the variant's name by default.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        engines: folder for TensorRT engines; None not to cache them.

    Raises:
        ManifestError: onnxruntime can't load it, or its inputs or outputs don't match the manifest.
    """
    return Predictor(
        content, manifest.input, len(manifest.classes), name=name or form.name, threads=threads, engines=engines
    )


class Model(Value):
    """An installed model, ready to run.

    Attributes:
        manifest: what it is and what it takes.
        directory: where it was read from.
        predictor: the model in onnxruntime.
        served: the variant that runs.
        signature: description of the signature check.
    """

    manifest: Manifest
    directory: Path
    predictor: Predictor
    served: Variant
    signature: str

    @staticmethod
    def load(directory: Path, *, threads: int = 0, accept: Accept | None = None) -> Model:
        """Load a model directory, or the version in use under a root of versions.

        The bytes that run are the bytes that were checked.

        Args:
            directory: with the manifest and the model, or with versions of it.
            threads: threads of one prediction; 0 lets onnxruntime choose.
            accept: check of its manifest, e.g. of the signature; None for none.

        Raises:
            ModelError: no valid manifest, altered bytes, a manifest that is not accepted, or a model that onnxruntime can't load.
            SlotError: no usable version.
        """
        directory = resolve(directory)
        manifest, signature = read_signed(directory, accept)
        served = manifest.served
        file = served.file or manifest.model
        predictor = predictor_of(
            manifest,
            served,
            read_model(directory, manifest, file),
            name=str(directory / file.name),
            threads=threads,
            engines=engines_of(directory) / file.sha256[:16],
        )
        return Model(manifest, directory, predictor, served, signature)

    @property
    def version(self) -> str:
        """The version's name, e.g. 0003; the folder's name if there are no versions."""
        return self.directory.name

    def identity(self) -> dict[str, str | int]:
        """The model's identity, as in every response of a server."""
        return {"federation": self.manifest.federation, "round": self.manifest.round, "version": self.version}

    def by_name(self, probabilities: Floats) -> Floats:
        """Probabilities [N, C] with the classes sorted by name, to compare two models."""
        classes = self.manifest.classes
        return probabilities[:, np.argsort(classes, kind="stable")] if classes else probabilities

    def predict(self, inputs: Sequence[Sample] | Sample) -> Floats:
        """Probabilities of inputs, [N, C] float32; arguments and errors as for `Predictor.run`."""
        return self.predictor.run(inputs).probabilities

    def classify(
        self, image: str | Path | bytes | Sample, top: int = 3, max_pixels: int = MAX_PIXELS
    ) -> tuple[Guess, ...]:
        """The likeliest classes of one image or tensor, likeliest first.

        Args:
            image: a file, its bytes, or an array in the model's form.
            top: number of classes.
            max_pixels: larger images are rejected by their header.

        Raises:
            InputError: no such file, not one image or tensor, damaged, or over the pixel limit.
            ValueError: an array of another shape or element type, or with numbers that are not finite.
        """
        source = Path(image) if isinstance(image, str) else image
        inputs = load_inputs(source, self.manifest.input, max_pixels)
        if len(inputs) != 1:
            raise InputError("tensors", f"the file has {len(inputs)}; use `predict` for several")
        return self.top(self.predict(inputs)[0], top)

    def top(self, probabilities: Floats, count: int) -> tuple[Guess, ...]:
        """The `count` likeliest classes of one input, likeliest first; ties keep the order of the classes."""
        order = np.argsort(-probabilities, kind="stable")[:count]
        return tuple(Guess(self.manifest.classes[index], float(probabilities[index])) for index in order)
