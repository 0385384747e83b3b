"""Specs, weights and image files for the tests of `export`."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from export.build.install_model import package_personal
from export.model.runtime import Model, load_all
from fedcg.imaging import Pixels
from fedcg.learning.networks import build_part, weights_of
from fedcg.learning.spec import FederationSpec, ImageForm, InputForm, NetworkChoice
from fedcg.wire.parts import Part, ReportField

CLASSES = ("ant", "bee", "cat")
LOADED_PROBE = """
import sys
from fedcg.cli import main
sys.argv = ["fedcg", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    code = stop.code
loaded = [name for name in ("torch", "paho", "onnx", "safetensors", "fedcg.wire", "fedcg.learning") if name in sys.modules]
print("LOADED", loaded, file=sys.stderr)
sys.exit(code)
"""
"""A program that runs `fedcg` with its arguments and prints the loaded modules of the learning core and the wire on stderr."""


def image_form(mode: str = "RGB", height: int = 20, width: int = 24) -> ImageForm:
    """A form with different normalisation per channel, so that mixed-up channels or sides are detected."""
    statistics = {"L": ((0.4,), (0.3,)), "RGB": ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3))}[mode]
    values = {"mode": mode, "height": height, "width": width, "mean": statistics[0], "std": statistics[1]}
    return ImageForm.model_validate(values)


def make_spec(form: InputForm | None = None, split: str = "lenet5_relu") -> FederationSpec:
    """Return a small federation's spec."""
    return FederationSpec(
        federation="garden",
        classes=CLASSES,
        input=form or image_form(),
        network=NetworkChoice(split=split),
        method="fedcg",
        params={},
        rounds=3,
        seed=7,
        upload=(Part.CLASSIFIER,),
        report=(ReportField.EXAMPLES,),
        layouts={},
    )


def make_parts(spec: FederationSpec, seed: int = 1) -> Mapping[Part, Mapping[str, torch.Tensor]]:
    """Return weights larger than usual, so that the logits of different images differ clearly (sigmoids flatten them more)."""
    scale = 5 if spec.network.split == "lenet5" else 2
    stream = torch.Generator().manual_seed(seed)
    parts = {part: weights_of(build_part(spec, part, stream)) for part in (Part.EXTRACTOR, Part.CLASSIFIER)}
    return {part: {name: tensor * scale for name, tensor in weights.items()} for part, weights in parts.items()}


def install_model(
    root: Path, *, seed: int = 1, spec: FederationSpec | None = None, images: TestImages | None = None, **options: Any
) -> Path:
    """Install a new version under `root`, of a model with weights from `seed`; options as for `package_personal`."""
    torch.set_num_threads(1)
    spec = spec or make_spec()
    tested = {} if images is None else {"test_files": images.files, "test_labels": images.labels}
    return package_personal(spec, make_parts(spec, seed), root, **{"round_number": seed, **tested, **options})


def picture(seed: int, height: int = 33, width: int = 47) -> Image.Image:
    """Return a colourful picture with edges and gradients, of an odd size."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [
        np.sin(rows * random.uniform(0.05, 0.9) + columns * random.uniform(0.05, 0.9) + shift) for shift in range(3)
    ]
    pixels = np.stack(waves, axis=-1) * 100 + 128 + random.normal(0, 12, (height, width, 3))
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    """Return the bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, format=file_format, **options)
    return buffer.getvalue()


def random_pixels(form: ImageForm, count: int) -> np.ndarray:
    """Return noise images, [N, H, W, C] uint8, the same in every call."""
    shape = (count, form.height, form.width, form.channels)
    return np.random.default_rng(3).integers(0, 256, shape, dtype=np.uint8)


def flip_bit(path: Path, position: int) -> None:
    """Alter one bit of the byte at this position of a file."""
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def labels_by(directory: Path, images: Sequence[Pixels | Path]) -> list[int]:
    """Return the labels for which an installed model is always correct."""
    model = Model.load(directory, threads=1)
    return [int(label) for label in model.predict(load_all(images, model.manifest.input)).argmax(axis=1)]


@dataclass(frozen=True)
class TestImages:
    """Files and their labels."""

    __test__ = False
    files: list[Path]
    labels: list[int]


def write_images(folder: Path, count: int = 12) -> TestImages:
    """`count` files under folder/CLASS/, PNG and JPEG in turn, of different sizes."""
    files, labels = [], []
    for number in range(count):
        label = number % len(CLASSES)
        path = folder / CLASSES[label] / f"{number:03d}{'.png' if number % 2 else '.jpg'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(number, 20 + number % 5 * 9, 24 + number % 3 * 11).save(path)
        files.append(path)
        labels.append(label)
    return TestImages(files, labels)
