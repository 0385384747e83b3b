"""The manifest beside a model and its signature: what the model is, what it takes, how it was verified, which device made it.

Imports neither torch nor numpy nor onnxruntime.

The manifest names every file by its sha256, so a signature over the manifest covers them all. `manifest.sig` holds the device's public key and an Ed25519 signature over the manifest's bytes with a domain prefix.
The agent notes its public key in `signing.pub` of the private store, above the models; whoever runs a model from there accepts only models of that device.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError, model_validator

from export.errors import ExportError, InputError, ManifestError, ModelError, TamperedError
from fedcg.config_file import problems_in_words
from fedcg.errors import NOT_FOUND
from fedcg.files import READABLE, replace_durably
from fedcg.input_form import InputForm, TensorForm

if TYPE_CHECKING:
    from fedcg.wire.messages.envelopes import VerifyKey


MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "manifest.sig"
SIGNERS_NAME = "signing.pub"
Accept = Callable[[Path, bytes], str]
"""Gets a model's directory and the bytes of its manifest before these are used; raises ModelError to refuse them, else says what was checked."""
DOMAIN = b"fedcg/1 model manifest\0"
MAX_SIGNATURE_BYTES = 4096


class Signature(BaseModel):
    """The signature file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def sign_manifest(directory: Path, key_file: Path) -> None:
    """Sign the manifest of a model as it is now.

    Args:
        directory: of the model.
        key_file: the device's message key.

    Raises:
        InputError: it can't be read, or is no such key.
    """
    from fedcg.wire.errors import MalformedError
    from fedcg.wire.messages.envelopes import SigningKey

    try:
        key = SigningKey.load(key_file)
    except OSError as error:
        raise InputError(str(key_file), error.strerror or str(error)) from error
    except MalformedError as error:
        raise InputError(str(key_file), str(error)) from error
    signature = key.sign(DOMAIN + (directory / MANIFEST_NAME).read_bytes()).hex()
    (directory / SIGNATURE_NAME).write_text(Signature(key=key.public.hex, signature=signature).model_dump_json() + "\n")


def signer_of(directory: Path) -> str | None:
    """The public key that a model names as its signer, unchecked; None for an unsigned one.

    Raises:
        ManifestError: the signature file is not valid.
    """
    signature = _read_signature(directory)
    return None if signature is None else signature.key


def required(given: str) -> Accept:
    """The check that a device signed a manifest, for `manifest.read_manifest` and what calls it.

    Args:
        given: the device's public key in 64 hex digits, a file that holds one or several of them, or the device's own key file.

    Returns:
        Says which key it was; raises TamperedError for a manifest that is not signed, signed by another key, or not the one that
        was signed, and ManifestError for a signature file that is not valid.

    Raises:
        ExportError: there is no such key.
        ModelError: signatures can't be checked here.
    """
    from fedcg.wire.errors import MalformedError

    path = Path(given)
    try:
        wanted = (_verify_key(given),) if len(given) == 64 and not path.exists() else _keys_in(path)
    except (OSError, MalformedError) as error:
        raise ExportError(
            f"{given}: {getattr(error, 'strerror', None) or error}; give a device's public key in 64 hex digits, or a file that holds it "
            "(`fedcg device show` on the coordinator shows it)",
            exit_code=NOT_FOUND if isinstance(error, FileNotFoundError) else None,
        ) from error
    return partial(_check_signer, wanted=wanted, source=given)


def check_by_this_box(directory: Path, manifest: bytes) -> str:
    """The check where a model is used and its signer was not named: by `signing.pub`, where that is there, else `check_intact`.

    The file above the folder of versions counts first: a server that may write to the versions alone can't alter it.

    Raises:
        ExportError: as of `required` and what it returns.
    """
    root = directory.resolve().parent
    path = next((one for one in (root.parent / SIGNERS_NAME, root / SIGNERS_NAME) if one.is_file()), None)
    accept = check_intact if path is None else required(str(path))
    return accept(directory, manifest)


def note_signer(store: Path, key: str) -> None:
    """Note a device's public key in its private store, beside those that it had before.

    Raises:
        OSError: the file can't be read or written.
        MalformedError: it is damaged.
    """
    path = store / SIGNERS_NAME
    known = [one.hex for one in _keys_in(path)] if path.exists() else []
    if key not in known:
        replace_durably(path, _key_type().file_of(*known, key), READABLE)


def check_intact(directory: Path, manifest: bytes) -> str:
    """The check of a manifest that may be of any device: it is the one that was signed, by whomever. One without a signature passes.

    Raises:
        TamperedError: the manifest, the signature or the key beside it was altered.
        ManifestError: the signature file is not valid.
        ModelError: the signature can't be checked here.
    """
    signature = _read_signature(directory)
    if signature is None:
        return "no signature: not checked"
    return _check_signer(directory, manifest, (_verify_key(signature.key),), "the key beside it, which nobody named")


def _keys_in(path: Path) -> tuple[VerifyKey, ...]:
    content = path.read_bytes()
    if b"-----BEGIN" in content:  # behind a first line with its check
        from fedcg.wire.messages.envelopes import SigningKey

        return (SigningKey.load(path).public,)
    return _key_type().load_all(path)


def _verify_key(text: str) -> VerifyKey:
    return _key_type().from_hex(text)


def _key_type() -> type[VerifyKey]:
    try:
        from fedcg.wire.messages.envelopes import VerifyKey
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the signature of a model can't be checked: the Python package {error.name!r} is not installed here. "
            "Install it with: pip install cryptography"
        ) from error
    return VerifyKey


def _check_signer(directory: Path, manifest: bytes, wanted: tuple[VerifyKey, ...], source: str) -> str:
    signature, path = _read_signature(directory), directory / SIGNATURE_NAME
    if signature is None:
        raise TamperedError(f"{path}: the model is not signed; only models signed by {source} are used")
    key = next((one for one in wanted if one.hex == signature.key), None)
    if key is None:
        raise TamperedError(f"{path}: signed by {signature.key}, not by {source}: the model of another box")
    if not key.verifies(bytes.fromhex(signature.signature), DOMAIN + manifest):
        raise TamperedError(f"{path}: the signature is not over this {MANIFEST_NAME}; one of them was altered")
    return f"signature checked with {source} (fingerprint {key.hex[:16]})"


def _read_signature(directory: Path) -> Signature | None:
    path = directory / SIGNATURE_NAME
    try:
        with path.open("rb") as file:
            return Signature.model_validate_json(file.read(MAX_SIGNATURE_BYTES + 1))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    except ValidationError as error:
        raise ManifestError(
            f"{path}: not a signature of a manifest; sign the model again, or remove the file"
        ) from error


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


VariantName = Literal["fp32", "fp16", "int8", "trt_fp16"]
Takes = Literal["pixels", "normalised", "tensors"]


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
        source: "files" (held-out image files, or tensors of an `.npz`) or "noise" (random ones: there were no files, so there is no accuracy).
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
        name: "fp32" is the model as exported; "fp16" and "int8" by their arithmetic; "trt_fp16" the model as exported, with float16 inside TensorRT's engines.
        file: where it lies; None when it was not kept.
        latency_ms: median milliseconds of one prediction at batch 1.
        accuracy: share of held-out images that it gets right, in [0, 1].
        top1_agreement: share of them for which it names the class that fp32 names.
        images: how many held-out images that was measured on.
        reason: why it was kept or not.
        machine: what it is bound to (`providers.machine`); None where it runs anywhere.
    """

    name: VariantName
    file: ModelFile | None = None
    latency_ms: Annotated[Finite, Field(ge=0)] | None = None
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
            [batch, channels, height, width] at the size of `input`, `(x / 255 - mean) / std` of its pixels: preprocessing outside;
            "tensors" is [batch, *shape] of the type of `input`, normalisation inside.
    """

    format: Literal[2] = 2
    federation: Annotated[str, Field(min_length=1, max_length=63)]
    round: Annotated[int, Field(ge=0)]
    spec: Sha256
    classes: Annotated[tuple[str, ...], Field(max_length=10_000)]
    input: InputForm
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
    def _takes_its_input(self) -> Manifest:
        if (self.takes == "tensors") != isinstance(self.input, TensorForm):
            raise ValueError(f"takes {self.takes}, which is not what its input is: {self.input.kind}")
        if len(self.classes) == 1:
            raise ValueError("classes: two or more, or none for another task than classification")
        return self

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
