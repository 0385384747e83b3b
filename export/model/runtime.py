"""Runs an exported model with onnxruntime and numpy; imports no torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from export.errors import ManifestError
from export.model.manifest import Manifest, Takes, Variant, read_model, read_signed
from export.model.preprocess import load_image, normalise
from export.model.providers import machine, session_providers
from export.model.signature import Accept
from export.model.versions import engines_of, resolve
from fedcg.image_form import ImageForm
from fedcg.imaging import MAX_PIXELS, Pixels

Floats = npt.NDArray[np.float32]

INPUT_NAME = "images"  # decoded pixels, of a model with its preprocessing inside
NETWORK_INPUT = "input"  # the network's own input: of a model without
OUTPUT_NAMES = ("logits", "probabilities")
BATCH = 256
_LOG_ERRORS_ONLY = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Guess:
    """A class name and its probability in [0, 1]."""

    label: str
    probability: float


@dataclass(frozen=True)
class Outputs:
    """The outputs of the model for N images: `logits` and `probabilities`, both [N, C] float32."""

    logits: Floats
    probabilities: Floats


class Predictor:
    """An ONNX model in onnxruntime, checked to take and give what fits a form and a number of classes.

    Args:
        content: bytes of the ONNX file.
        form: mode, size and statistics of an image.
        class_count: C, the number of classes.
        takes: pixels, or normalised values; then the pixels are normalised here.
        name: what to call the file in errors.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        engines: folder of TensorRT's engines, where there is TensorRT; None: they are not kept.
        is_half: whether TensorRT may use float16.

    Raises:
        ManifestError: onnxruntime refuses the model, or it takes or gives something else.
    """

    def __init__(
        self,
        content: bytes,
        form: ImageForm,
        class_count: int,
        *,
        takes: Takes = "pixels",
        name: str = "model",
        threads: int = 0,
        engines: Path | None = None,
        is_half: bool = False,
    ) -> None:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _LOG_ERRORS_ONLY
        options.intra_op_num_threads = threads
        # Images come at the network's size, so that different ones share a batch: so onnxruntime leaves the resize out.
        options.add_free_dimension_override_by_name("height", form.height)
        options.add_free_dimension_override_by_name("width", form.width)
        asked = session_providers(engines, is_half=is_half)
        try:
            session = onnxruntime.InferenceSession(content, options, providers=asked)
        except Exception as error:  # onnxruntime's own exception types are not public
            raise ManifestError(f"{name}: onnxruntime cannot load it ({error})") from error
        self.name = name
        self.shape = form.shape
        self.class_count = class_count
        self.takes = takes
        self._form = form
        self._session = session
        self._check_signature(name)

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return tuple(self._session.get_providers())

    def run(self, images: Sequence[Pixels] | Pixels) -> Outputs:
        """Logits and probabilities of images.

        Args:
            images: each [height, width, channels] uint8 as `export.model.preprocess.load_image` gives it.

        Raises:
            ValueError: an image of another shape or element type.
        """
        for position, image in enumerate(images):
            if image.shape != self.shape or image.dtype != np.uint8:
                raise ValueError(f"image {position} is {image.dtype} {image.shape}; the model takes uint8 {self.shape}")
        logits = np.empty((len(images), self.class_count), dtype=np.float32)
        probabilities = np.empty_like(logits)
        for start in range(0, len(images), BATCH):
            rows = slice(start, start + BATCH)
            batch = np.stack(list(images[rows]))
            fed = {INPUT_NAME: batch} if self.takes == "pixels" else {NETWORK_INPUT: normalise(batch, self._form)}
            logits[rows], probabilities[rows] = self._session.run(list(OUTPUT_NAMES), fed)
        return Outputs(logits, probabilities)

    def _check_signature(self, name: str) -> None:
        inputs = [(one.name, one.type, tuple(one.shape[1:])) for one in self._session.get_inputs()]
        outputs = [(one.name, one.type, tuple(one.shape[1:])) for one in self._session.get_outputs()]
        height, width, channels = self.shape
        taken = {
            "pixels": (INPUT_NAME, "tensor(uint8)", self.shape),
            "normalised": (NETWORK_INPUT, "tensor(float)", (channels, height, width)),
        }[self.takes]
        expected = ([taken], [(o, "tensor(float)", (self.class_count,)) for o in OUTPUT_NAMES])
        if (inputs, outputs) != expected:
            raise ManifestError(f"{name}: takes {inputs} and gives {outputs}; expected {expected[0]} and {expected[1]}")
        self._check_form(name)

    def _check_form(self, name: str) -> None:
        """Check the image form in the file's metadata; shapes are not enough, because a model takes pixels of any size."""
        form = self._form
        sizes: dict[str, object] = {"mode": form.mode, "height": form.height, "width": form.width}
        wanted = sizes | {"mean": list(form.mean), "std": list(form.std)}
        stated = self._session.get_modelmeta().custom_metadata_map.get("image", "")
        try:
            is_right = json.loads(stated) == wanted
        except ValueError:
            is_right = False
        if not is_right:
            raise ManifestError(f"{name}: was made for images {stated[:300] or 'of no stated form'}; expected {wanted}")


def predictor_of(
    manifest: Manifest, form: Variant, content: bytes, *, name: str = "", threads: int = 0, engines: Path | None = None
) -> Predictor:
    """One form of a model in onnxruntime.

    Args:
        manifest: of the model.
        form: which form.
        content: bytes of its file.
        name: what to call it in errors; the form's name by default.
        threads: threads of one prediction; 0 lets onnxruntime choose.
        engines: folder of TensorRT's engines; None: they are not kept.

    Raises:
        ManifestError: onnxruntime refuses it, or it takes or gives something else than the manifest says.
    """
    return Predictor(
        content,
        manifest.image,
        len(manifest.classes),
        takes=manifest.takes,
        name=name or form.name,
        threads=threads,
        engines=engines,
        is_half=form.is_half,
    )


@dataclass(frozen=True)
class Model:
    """An installed model, ready to run.

    Attributes:
        manifest: what it is and what it takes.
        directory: where it was read from.
        predictor: the model in onnxruntime.
        served: which of its forms that is; the one as exported where the manifest's choice is bound to another machine.
        signature: what of its signature was checked, in words.
    """

    manifest: Manifest
    directory: Path
    predictor: Predictor
    served: Variant
    signature: str

    @staticmethod
    def load(directory: Path, *, threads: int = 0, accept: Accept | None = None) -> Model:
        """Read a model directory, or the version in use under a root of slots, and make it ready.

        The bytes that are checked are the bytes that run.

        Args:
            directory: holds the manifest and the model, or versions of it.
            threads: threads of one prediction; 0 lets onnxruntime choose.
            accept: what its manifest must pass, e.g. the check of its signature; None for nothing.

        Raises:
            ModelError: no valid manifest, altered bytes, one that is not accepted, or a model that onnxruntime refuses.
            SlotError: slots without a usable version.
        """
        directory = resolve(directory)
        manifest, signature = read_signed(directory, accept)
        served = manifest.served_on(machine)
        if served.name != manifest.serves:
            log.warning(
                "%s: its form %s was made on another machine or with another onnxruntime; %s is used. "
                "`fedcg model optimise` tries the forms here",
                directory,
                manifest.serves,
                served.name,
            )
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
        """The version's name, e.g. 0003; that of the folder where there are no versions."""
        return self.directory.name

    def identity(self) -> dict[str, str | int]:
        """Which model it is, as every answer of a server names it."""
        return {"federation": self.manifest.federation, "round": self.manifest.round, "version": self.version}

    @cached_property
    def _name_order(self) -> npt.NDArray[np.intp]:
        return np.argsort(self.manifest.classes, kind="stable")

    def by_name(self, probabilities: Floats) -> Floats:
        """Its probabilities [N, C] with the classes in the order of their names: the order in which two models are compared."""
        ordered: Floats = probabilities[:, self._name_order]
        return ordered

    def predict(self, images: Sequence[Pixels] | Pixels) -> Floats:
        """Probabilities of images, [N, C] float32.

        Args:
            images: each [height, width, channels] uint8 as `export.model.preprocess.load_image` gives it.

        Raises:
            ValueError: an image of another shape or element type.
        """
        return self.predictor.run(images).probabilities

    def classify(self, image: str | Path | bytes, top: int = 3, max_pixels: int = MAX_PIXELS) -> tuple[Guess, ...]:
        """The likeliest classes of one image, likeliest first.

        Args:
            image: a file, or the bytes of one.
            top: how many classes.
            max_pixels: larger images are refused from their header.

        Raises:
            InputError: no such file, not an image, damaged, or over the pixel limit.
        """
        source = Path(image) if isinstance(image, str) else image
        [probabilities] = self.predict([load_image(source, self.manifest.image, max_pixels)])
        return self.top(probabilities, top)

    def top(self, probabilities: Floats, count: int) -> tuple[Guess, ...]:
        """The `count` likeliest classes of one image, likeliest first; of equal ones the earlier class."""
        order = np.argsort(-probabilities, kind="stable")[:count]
        return tuple(Guess(self.manifest.classes[index], float(probabilities[index])) for index in order)
