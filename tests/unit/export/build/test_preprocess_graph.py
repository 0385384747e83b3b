"""A model's own way from a decoded image to the network's input is, bit for bit, the one of training and of `load_image`."""

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx.parser import parse_model
from PIL import Image

from export.build import to_onnx
from export.build.preprocess_graph import add_preprocessing, on_network
from export.build.to_onnx import export_personal
from export.errors import VerificationError
from export.model.runtime import load_image, normalise
from fedcg.imaging import Pixels
from fedcg.input_form import ImageForm
from fedcg.learning.data import image_folder as data
from fedcg.learning.data.sources import fit_pixels
from tests.support.learning.export_models import TestImages, encoded, image_form, make_parts, make_spec

FORMS = {"landscape": (20, 24), "square": (32, 32), "tall": (17, 5), "large": (61, 90)}


def _identity(form: ImageForm) -> onnx.ModelProto:
    """A network that gives what it takes."""
    shape = f"float[batch, {form.channels}, {form.height}, {form.width}]"
    return parse_model(
        f'<ir_version: 8, opset_import: ["" : 18]> network ({shape} input) => ({shape} seen) '
        "{ seen = Identity (input) }"
    )


@lru_cache
def _kept(mode: str, name: str) -> tuple[ImageForm, onnxruntime.InferenceSession]:
    form = image_form(mode, *FORMS[name])
    model = add_preprocessing(_identity(form), form)
    onnx.checker.check_model(model, full_check=True)
    return form, onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _seen(session: onnxruntime.InferenceSession, images: Pixels) -> np.ndarray:
    [seen] = session.run(None, {"images": images})
    result: np.ndarray = seen
    return result


def _of_training(image: Pixels, form: ImageForm) -> np.ndarray:
    """What the networks see in training: [1, C, H, W] float32."""
    fitted = fit_pixels(image.squeeze(-1) if form.channels == 1 else image, form)
    result: np.ndarray = data.normalise(torch.tensor(fitted)[None], form).numpy()
    return result


def _random(height: int, width: int, channels: int, seed: int, *, harsh: bool) -> Pixels:
    """Noise; harsh noise is black and white alone, where rounding and clipping show most."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return np.where(pixels > 127, 255, 0).astype(np.uint8) if harsh else pixels


@settings(max_examples=30, deadline=None)
@given(
    mode=st.sampled_from(["L", "RGB"]),
    name=st.sampled_from(list(FORMS)),
    height=st.integers(1, 150),
    width=st.integers(1, 150),
    seed=st.integers(0, 1000),
    harsh=st.booleans(),
)
@example(mode="L", name="landscape", height=1, width=1, seed=0, harsh=False)
@example(mode="RGB", name="landscape", height=1, width=149, seed=0, harsh=False)
@example(mode="RGB", name="landscape", height=149, width=1, seed=0, harsh=True)
@example(mode="RGB", name="landscape", height=20, width=24, seed=0, harsh=False)
@example(mode="RGB", name="landscape", height=24, width=20, seed=0, harsh=False)
@example(mode="L", name="square", height=64, width=96, seed=0, harsh=True)
@example(mode="RGB", name="large", height=4, width=7, seed=0, harsh=True)
@example(mode="RGB", name="square", height=5000, width=3, seed=0, harsh=True)
@example(mode="L", name="tall", height=2, width=20_000, seed=0, harsh=True)
def test_an_image_of_any_size_becomes_the_input_that_training_saw(
    mode: str, name: str, height: int, width: int, seed: int, harsh: bool
) -> None:
    form, session = _kept(mode, name)
    image = _random(height, width, form.channels, seed, harsh=harsh)
    wanted = _of_training(image, form)
    assert _seen(session, image[None]).tobytes() == wanted.tobytes()
    file = encoded(Image.fromarray(image.squeeze(-1) if mode == "L" else image), "PNG")
    outside = load_image(file, form)
    assert normalise(outside[None], form).tobytes() == wanted.tobytes()
    np.testing.assert_array_equal(load_image(file, form, resize=False), image)


@pytest.mark.parametrize("name", list(FORMS))
def test_a_batch_is_resized_as_its_images_are(name: str) -> None:
    form, session = _kept("RGB", name)
    images = np.stack([_random(41, 70, 3, seed, harsh=False) for seed in range(5)])
    wanted = np.concatenate([_of_training(image, form) for image in images])
    np.testing.assert_array_equal(_seen(session, images), wanted)
    assert not np.array_equal(wanted[0], wanted[1])


def test_a_model_without_preprocessing_is_converted_as_it_is() -> None:
    network = _identity(image_form())
    assert on_network(network, lambda one: one) == network


@pytest.mark.parametrize(("name", "other"), [("half_i", 0), ("half_d", 0.4)])
@pytest.mark.parametrize("with_files", [True, False])
def test_a_model_whose_own_preprocessing_differs_from_training_is_refused(
    tmp_path: Path, images: TestImages, name: str, other: float, with_files: bool
) -> None:
    spec, path = make_spec(), tmp_path / "model.onnx"
    parts = make_parts(spec)
    export_personal(spec, parts, path)
    proto = onnx.load(path)
    resize = next(node for node in proto.graph.node if node.op_type == "If").attribute[1].g
    [constant] = [node for node in resize.node if node.output[0] == f"preprocess/{name}"]
    kind = onnx.helper.tensor_dtype_to_np_dtype(constant.attribute[0].t.data_type)
    constant.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array(other, kind)))
    onnx.save(proto, path)
    files, labels = (images.files, images.labels) if with_files else ([], [])
    with pytest.raises(VerificationError, match="differently from training"):
        to_onnx.verify(path, spec, parts, files, labels)


_PHOTOGRAPH = """
import resource, sys
import numpy, onnxruntime
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
image = numpy.random.default_rng(0).integers(0, 256, (1, 3000, 4000, 3), dtype=numpy.uint8)
session.run(None, {"images": image[:, :40, :40].copy()})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
seen = session.run(None, {"images": image})[0]
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 / image.nbytes)
numpy.save(sys.argv[2], seen)
"""


@pytest.mark.slow
def test_a_photograph_takes_a_few_times_its_own_memory(tmp_path: Path) -> None:
    form = image_form(height=224, width=224)
    model, seen = tmp_path / "model.onnx", tmp_path / "seen.npy"
    onnx.save(add_preprocessing(_identity(form), form), model)
    words = [sys.executable, "-c", _PHOTOGRAPH, str(model), str(seen)]
    told = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout
    assert float(told) < 6  # times the decoded image; double matrices of it alone would be 8
    image = np.random.default_rng(0).integers(0, 256, (1, 3000, 4000, 3), dtype=np.uint8)
    np.testing.assert_array_equal(np.load(seen), _of_training(image[0], form))
