"""The manifest beside a model: what it is, what it takes, how it was verified.

A file format of its own with a version: a box that only predicts reads it without the learning core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from export.errors import ManifestError, TamperedError
from export.model.signature import MANIFEST_NAME, Accept, check_intact
from fedcg.config_file import problems_in_words
from fedcg.image_form import ImageForm

MODEL_NAME = "model.onnx"
MANIFEST_FORMAT = 2
MAX_MANIFEST_BYTES = 8 * 1024 * 1024

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelFile(_Frozen):
    """The file that holds the model, named by the sha256 of its bytes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.onnx$")] = MODEL_NAME
    sha256: Sha256
    size: Annotated[int, Field(ge=1)]
    opset: Annotated[int, Field(ge=1)]


VariantName = Literal["fp32", "ort", "fp16", "int8", "trt_fp16"]
Takes = Literal["pixels", "normalised"]


class VariantCheck(_Frozen):
    """A form of the model beside the model as exported, on the same held-out image files, which had no part in choosing it.

    Attributes:
        name: which form.
        accuracy: share that it gets right, in [0, 1].
        accuracy_fp32: share that the model as exported gets right.
        top1_agreement: share for which both name the same class.
        max_abs_difference: largest difference of a logit.
        images: how many image files.
    """

    name: VariantName
    accuracy: Annotated[float, Field(ge=0, le=1)]
    accuracy_fp32: Annotated[float, Field(ge=0, le=1)]
    top1_agreement: Annotated[float, Field(ge=0, le=1)]
    max_abs_difference: Annotated[Finite, Field(ge=0)]
    images: Annotated[int, Field(ge=1)]


class Verification(_Frozen):
    """The ONNX model beside the trained one, on the same images, both from the encoded file on.

    Attributes:
        images: how many images were compared.
        source: "files" (held-out image files) or "noise" (random pixels: there were no files, so there is no accuracy).
        max_abs_difference: largest difference of a logit.
        top1_agreement: share of images for which both name the same class, in [0, 1].
        accuracy_torch: share that the trained model gets right, in [0, 1].
        accuracy_onnx: share that the ONNX model gets right, in [0, 1].
        variants: the same of each other form of it that was tried and fast enough.
    """

    images: Annotated[int, Field(ge=1)]
    source: Literal["files", "noise"]
    max_abs_difference: Annotated[Finite, Field(ge=0)]
    top1_agreement: Annotated[float, Field(ge=0, le=1)]
    accuracy_torch: Annotated[float, Field(ge=0, le=1)] | None = None
    accuracy_onnx: Annotated[float, Field(ge=0, le=1)] | None = None
    variants: Annotated[tuple[VariantCheck, ...], Field(max_length=8)] = ()


class Variant(_Frozen):
    """One form of the model, as it was tried on the box that serves it.

    Attributes:
        name: "fp32" is the model as exported; "ort" the same with its graph optimised for one machine; "fp16" and "int8" by their
            arithmetic; "trt_fp16" the model as exported, with float16 inside TensorRT's engines.
        file: where it lies; None when it was not kept.
        latency_ms: median milliseconds of one prediction at batch 1.
        start_ms: median milliseconds from the file's bytes to a session that predicts.
        accuracy: share of held-out images that it gets right, in [0, 1].
        top1_agreement: share of them for which it names the class that fp32 names.
        images: how many held-out images that was measured on.
        reason: why it was kept or not.
        machine: what it is bound to (`providers.machine`); None where it runs anywhere.
    """

    name: VariantName
    file: ModelFile | None = None
    latency_ms: Annotated[Finite, Field(ge=0)] | None = None
    start_ms: Annotated[Finite, Field(ge=0)] | None = None
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = None
    images: Annotated[int, Field(ge=0)] = 0
    reason: Annotated[str, Field(max_length=500)] = ""
    machine: Annotated[str, Field(max_length=300)] | None = None

    @property
    def is_half(self) -> bool:
        """Whether TensorRT may use float16 for it."""
        return self.name == "trt_fp16"


class Gate(_Frozen):
    """How the model compared with the one in service before it, on the box's own held-out images.

    Attributes:
        against: the version in service then.
        images: how many images.
        before: share that it got right, in [0, 1].
        accuracy: share that this model gets right.
        allowed: how much less was allowed.
    """

    against: Annotated[str, Field(max_length=20)]
    images: Annotated[int, Field(ge=1)]
    before: Annotated[float, Field(ge=0, le=1)]
    accuracy: Annotated[float, Field(ge=0, le=1)]
    allowed: Annotated[float, Field(ge=0, le=1)]


class Manifest(_Frozen):
    """All that a runtime and a person need to know about an exported model.

    Attributes:
        takes: "pixels" is uint8 [batch, any height, any width, channels], preprocessing inside; "normalised" is float32
            [batch, channels, height, width] at the size of `image`, `(x / 255 - mean) / std` of its pixels: preprocessing outside.
    """

    format: Literal[2] = 2
    federation: Annotated[str, Field(min_length=1, max_length=63)]
    round: Annotated[int, Field(ge=0)]
    spec: Sha256
    classes: Annotated[tuple[str, ...], Field(min_length=2, max_length=10_000)]
    image: ImageForm
    takes: Takes
    model: ModelFile
    metrics: dict[str, Finite] = {}
    verification: Verification
    created: AwareDatetime
    versions: dict[str, str] = {}
    variants: Annotated[tuple[Variant, ...], Field(max_length=8)] = ()
    serves: VariantName = "fp32"
    gate: Gate | None = None

    @property
    def files(self) -> tuple[ModelFile, ...]:
        """Every model file of the directory: the one as exported first, then the variants that were kept."""
        kept = [one.file for one in self.variants if one.file is not None and one.file != self.model]
        return (self.model, *kept)

    def served_on(self, machine: Callable[[], str]) -> Variant:
        """The form to run: the chosen one, or the model as exported where that is bound to another machine.

        Args:
            machine: gives what a form that was made here would be bound to; called only where it matters.
        """
        for one in self.variants:
            if one.name == self.serves and (one.machine is None or one.machine == machine()):
                return one
        return Variant(name="fp32", file=self.model)

    @model_validator(mode="after")
    def _serves_what_was_kept(self) -> Manifest:
        if self.serves != "fp32" and self.serves not in {one.name for one in self.variants if one.file is not None}:
            raise ValueError(f"serves {self.serves}, which was not kept")
        return self


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest into a model directory."""
    (directory / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", encoding="utf-8")


def read_manifest(directory: Path, accept: Accept | None = None) -> Manifest:
    """The manifest that `read_signed` returns."""
    return read_signed(directory, accept)[0]


def read_signed(directory: Path, accept: Accept | None = None) -> tuple[Manifest, str]:
    """Read and check a model directory's manifest; returns it, and what of its signature was checked, in words.

    Args:
        directory: of the model.
        accept: who must have signed it, for one (`signature.required`); None for anybody or nobody (`signature.check_intact`).

    Raises:
        ManifestError: there is none, it is of a newer format, or it is not valid; names every bad field.
        TamperedError: it is not the one that was signed.
    """
    path = directory / MANIFEST_NAME
    try:
        with path.open("rb") as file:
            payload = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ManifestError(
            f"{path}: {error.strerror or error}; is {directory} the directory of an exported model?"
        ) from error
    if len(payload) > MAX_MANIFEST_BYTES:
        raise ManifestError(f"{path}: larger than {MAX_MANIFEST_BYTES} bytes")
    signature = (accept or check_intact)(directory, payload)
    try:
        return Manifest.model_validate_json(payload), signature
    except ValidationError as error:
        problems = problems_in_words(error, Manifest)[:1000]
        raise ManifestError(f"{path}: not a manifest of format {MANIFEST_FORMAT}: {problems}") from error


def digest(content: bytes) -> str:
    """The sha256 of some bytes, in hex."""
    return hashlib.sha256(content).hexdigest()


def read_model(directory: Path, manifest: Manifest, file: ModelFile | None = None) -> bytes:
    """The bytes of a model file, the one as exported unless another is named, checked against the manifest.

    Raises:
        ManifestError: the file is not there.
        TamperedError: other bytes than the manifest names.
    """
    named = file or manifest.model
    path = directory / named.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    if len(content) != named.size or digest(content) != named.sha256:
        raise TamperedError(
            f"{path}: the bytes are not the ones that {MANIFEST_NAME} names; restore it or use another version"
        )
    return content


def read_all(directory: Path, accept: Accept | None = None) -> tuple[Manifest, str]:
    """As `read_signed`, after every model file in the directory was checked against the manifest.

    Raises:
        ManifestError: no valid manifest, or a file that is not there.
        TamperedError: other bytes than the manifest names.
    """
    manifest, signature = read_signed(directory, accept)
    for file in manifest.files:
        read_model(directory, manifest, file)
    return manifest, signature
