"""Compares an ONNX model with the trained one on the same image files. Uses torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import torch
from torch import nn

from export.errors import VerificationError
from export.model.manifest import Takes, Verification
from export.model.preprocess import load_image
from export.model.runtime import INPUT_NAME, Floats, Predictor
from fedcg.image_form import ImageForm
from fedcg.imaging import Pixels, fit_pixels
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.networks.assembly import personal_model
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part

if TYPE_CHECKING:
    from fedcg.learning.method import Weights

# float32 rounding through a few layers stays near 1e-6 of the largest logit; a wrong resize or normalisation is far above 1e-4.
LOGIT_TOLERANCE = 1e-4
MIN_TOP1_AGREEMENT = 0.995
NOISE_IMAGES = 64
OWN_SIZE_IMAGES = 8  # a photograph takes the model's own resize a quarter of a second
_BATCH = 256


def verify(
    model_path: Path,
    spec: FederationSpec,
    parts: Mapping[Part, Weights],
    files: Sequence[Path],
    labels: Sequence[int],
    *,
    takes: Takes = "pixels",
    before: nn.Module | None = None,
) -> Verification:
    """Run both models over image files and compare them.

    The first files also go through a model's own preprocessing, each at its own size: the logits must be those of the image that
    training would see, to the last bit.

    Args:
        model_path: the ONNX file.
        spec: the federation's spec.
        parts: weights of the personal model's parts.
        files: held-out image files. Without any, random pixels are compared and no accuracy is given.
        labels: index of the right class per file.
        takes: what the ONNX model takes.
        before: what images go through before the trained network.

    Raises:
        VerificationError: its preprocessing is not that of training, a logit differs by more than 1e-4 of the largest one (or of 1), or fewer than 99.5 % of the images get
            the same class, or a value is not finite.
        InputError: a file that cannot be read as an image.
        ModelError: onnxruntime refuses the model.
    """
    if len(files) != len(labels):
        raise ValueError(f"{len(files)} files but {len(labels)} labels")
    content, threads = model_path.read_bytes(), torch.get_num_threads()
    predictor = Predictor(content, spec.image, spec.class_count, takes=takes, name=str(model_path), threads=threads)
    if takes == "pixels":
        _check_preprocessing(content, spec.image, files[:OWN_SIZE_IMAGES], model_path)
    network = personal_model(spec, parts, before=before)
    pairs = [
        (_logits(network, images, spec.image), predictor.run(images).logits) for images in _batches(files, spec.image)
    ]
    trained, exported = (np.concatenate(side) for side in zip(*pairs, strict=True))
    return _compare(trained, exported, np.asarray(labels, dtype=np.int64), model_path)


@torch.no_grad()
def _logits(network: nn.Module, images: Sequence[Pixels], form: ImageForm) -> Floats:
    """What training's own network gives for images: [B, classes] float32."""
    channels_first = torch.from_numpy(np.ascontiguousarray(np.stack(images).transpose(0, 3, 1, 2)))
    logits: Floats = network(normalise(channels_first, form)).numpy()
    return logits


def _check_preprocessing(content: bytes, form: ImageForm, files: Sequence[Path], model_path: Path) -> None:
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for name, own_size, fitted in _own_sizes(files, form):
        given, wanted = (session.run(["logits"], {INPUT_NAME: image[None]})[0] for image in (own_size, fitted))
        if not np.array_equal(given, wanted, equal_nan=True):
            raise VerificationError(
                f"{model_path}: brings {name} to its size in another way than training; it is not installed. Install the newest "
                "onnxruntime that this box can run, or export with --raw"
            )


def _own_sizes(files: Sequence[Path], form: ImageForm) -> Iterator[tuple[str, Pixels, Pixels]]:
    """Images at their own size and at the form's; one of random pixels at the end."""
    for file in files:
        yield str(file), load_image(file, form, resize=False), load_image(file, form)
    noise = _noise((2 * form.height + 1, form.width // 2 + 1, form.channels))
    yield "an image of random pixels", noise, fit_pixels(noise.squeeze(-1) if form.channels == 1 else noise, form)


def _batches(files: Sequence[Path], form: ImageForm) -> Iterator[Sequence[Pixels]]:
    if not files:
        yield list(_noise((NOISE_IMAGES, *form.shape)))
    for start in range(0, len(files), _BATCH):
        yield [load_image(file, form) for file in files[start : start + _BATCH]]


def _noise(shape: tuple[int, ...]) -> Pixels:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _compare(trained: Floats, exported: Floats, labels: np.ndarray, model_path: Path) -> Verification:
    if not (np.isfinite(trained).all() and np.isfinite(exported).all()):
        raise VerificationError(
            f"{model_path}: a model gives a logit that is not a number; train again from the last good round"
        )
    difference = float(np.abs(trained - exported).max())
    bound = LOGIT_TOLERANCE * max(1.0, float(np.abs(trained).max()))
    agreement = float((trained.argmax(1) == exported.argmax(1)).mean())
    if difference > bound or agreement < MIN_TOP1_AGREEMENT:
        raise VerificationError(
            f"{model_path}: not the trained model: logits differ by up to {difference:.2g} (allowed {bound:.2g}), "
            f"{agreement:.1%} of {len(trained)} images get the same class (needed {MIN_TOP1_AGREEMENT:.1%}); it is not installed"
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
