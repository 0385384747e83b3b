"""A model's manifest and its signature: origin, input, verification, and the device that made it.

Imports neither torch nor numpy nor onnxruntime.

The manifest names every file by its sha256, so a signature over the manifest covers all files. `manifest.sig` holds the device's public key and an Ed25519 signature over the manifest's bytes with a domain prefix.
The agent writes its public key to `signing.pub` in the private store, above the models. Only models of that device are accepted there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AwareDatetime, BaseModel, Field, ValidationError, model_validator

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
"""Takes a model's directory and the bytes of its manifest. Raises ModelError to reject them, else returns a description of the check."""
DOMAIN = b"fedcg/1 model manifest\0"
MAX_SIGNATURE_BYTES = 4096


class _Frozen(BaseModel, frozen=True, extra="forbid"):
    """A file, or a part of one."""


class Signature(_Frozen):
    """The signature file."""

    key: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    signature: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def sign_manifest(directory: Path, key_file: Path) -> None:
    """Sign a model's current manifest.

    Args:
        directory: of the model.
        key_file: the device's message key.

    Raises:
        InputError: the file can't be read, or is not a message key.
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
    """The public key in a model's signature, unchecked; None for an unsigned model.

    Raises:
        ManifestError: the signature file is not valid.
    """
    signature = _read_signature(directory)
    return None if signature is None else signature.key


def required(given: str) -> Accept:
    """Return a check that a device signed a manifest, for `manifest.read_manifest` and its callers.

    Args:
        given: the device's public key in 64 hex digits, a file with one or several public keys, or the device's private key file.

    Returns:
        A check that returns which key matched. It raises TamperedError for a manifest that is unsigned, altered or signed by
        another key, and ManifestError for an invalid signature file.

    Raises:
        ExportError: there is no such key.
        ModelError: the package that checks signatures is not installed.
    """
    from fedcg.wire.errors import MalformedError

    path = Path(given)
    try:
        wanted = (_key_type().from_hex(given),) if len(given) == 64 and not path.exists() else _keys_in(path)
    except (OSError, MalformedError) as error:
        raise ExportError(
            f"{given}: {getattr(error, 'strerror', None) or error}; give a device's public key in 64 hex digits, or a file that contains it "
            "(see `fedcg device show` on the coordinator)",
            exit_code=NOT_FOUND if isinstance(error, FileNotFoundError) else None,
        ) from error
    return partial(_check_signer, wanted=wanted, source=given)


def check_by_this_box(directory: Path, manifest: bytes) -> str:
    """Check a model whose signer was not given: against `signing.pub` if it exists, else with `check_intact`.

    The file above the folder of versions has priority: a server that can write only to the versions can't alter it.

    Raises:
        ExportError: as `required` and the check that it returns.
    """
    root = directory.resolve().parent
    path = next((one for one in (root.parent / SIGNERS_NAME, root / SIGNERS_NAME) if one.is_file()), None)
    accept = check_intact if path is None else required(str(path))
    return accept(directory, manifest)


def note_signer(store: Path, key: str) -> None:
    """Add a device's public key to `signing.pub` in its private store; earlier keys stay.

    Raises:
        OSError: the file can't be read or written.
        MalformedError: the file is damaged.
    """
    path = store / SIGNERS_NAME
    known = [one.hex for one in _keys_in(path)] if path.exists() else []
    if key not in known:
        replace_durably(path, _key_type().file_of(*known, key), READABLE)


def check_intact(directory: Path, manifest: bytes) -> str:
    """Check that a manifest is unaltered since some device signed it. A manifest without a signature passes.

    Raises:
        TamperedError: the manifest, the signature or its key was altered.
        ManifestError: the signature file is not valid.
        ModelError: the package that checks signatures is not installed.
    """
    signature = _read_signature(directory)
    if signature is None:
        return "no signature: not checked"
    return _check_signer(
        directory, manifest, (_key_type().from_hex(signature.key),), "its own key, signer not verified"
    )


def _keys_in(path: Path) -> tuple[VerifyKey, ...]:
    content = path.read_bytes()
    if b"-----BEGIN" in content:  # after a first line with a checksum
        from fedcg.wire.messages.envelopes import SigningKey

        return (SigningKey.load(path).public,)
    return _key_type().load_all(path)


def _key_type() -> type[VerifyKey]:
    try:
        from fedcg.wire.messages.envelopes import VerifyKey
    except ModuleNotFoundError as error:
        raise ModelError(
            f"the signature of a model can't be checked: the Python package {error.name!r} is not installed. "
            "Install it with: pip install cryptography"
        ) from error
    return VerifyKey


def _check_signer(directory: Path, manifest: bytes, wanted: tuple[VerifyKey, ...], source: str) -> str:
    signature, path = _read_signature(directory), directory / SIGNATURE_NAME
    if signature is None:
        raise TamperedError(f"{path}: the model is not signed; only models signed by {source} are accepted")
    key = next((one for one in wanted if one.hex == signature.key), None)
    if key is None:
        raise TamperedError(f"{path}: signed by {signature.key}, not by {source}: this is another device's model")
    if not key.verifies(bytes.fromhex(signature.signature), DOMAIN + manifest):
        raise TamperedError(f"{path}: the signature does not match this {MANIFEST_NAME}; one of them was altered")
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
        raise ManifestError(f"{path}: not a manifest signature; sign the model again, or remove the file") from error


MODEL_NAME = "model.onnx"
MANIFEST_FORMAT = 2
MAX_MANIFEST_BYTES = 8 * 1024 * 1024

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class ModelFile(_Frozen):
    """A model file, named by the sha256 of its bytes."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.onnx$")] = MODEL_NAME
    sha256: Sha256
    size: Annotated[int, Field(ge=1)]
    opset: Annotated[int, Field(ge=1)]


VariantName = Literal["fp32", "fp16", "int8"]


class VariantCheck(_Frozen):
    """A variant compared with the model as exported, on held-out image files that were not used to choose it.

    Attributes:
        name: of the variant.
        accuracy: its accuracy, in [0, 1].
        accuracy_fp32: accuracy of the model as exported.
        top1_agreement: share for which both predict the same class.
        max_abs_difference: largest difference of a logit.
        images: number of image files.
    """

    name: VariantName
    accuracy: Annotated[float, Field(ge=0, le=1)]
    accuracy_fp32: Annotated[float, Field(ge=0, le=1)]
    top1_agreement: Annotated[float, Field(ge=0, le=1)]
    max_abs_difference: Annotated[Finite, Field(ge=0)]
    images: Annotated[int, Field(ge=1)]


class Verification(_Frozen):
    """The ONNX model compared with the trained one on the same images, both from the encoded file.

    Attributes:
        images: number of images compared.
        source: "files" (held-out image files, or tensors of an `.npz`) or "noise" (random inputs, without accuracy).
        max_abs_difference: largest difference of a logit.
        top1_agreement: share of images for which both predict the same class, in [0, 1].
        accuracy_torch: accuracy of the trained model, in [0, 1].
        accuracy_onnx: accuracy of the ONNX model, in [0, 1].
        variants: the same figures for each variant that was tried and fast enough.
    """

    images: Annotated[int, Field(ge=1)]
    source: Literal["files", "noise"]
    max_abs_difference: Annotated[Finite, Field(ge=0)]
    top1_agreement: Annotated[float, Field(ge=0, le=1)]
    accuracy_torch: Annotated[float, Field(ge=0, le=1)] | None = None
    accuracy_onnx: Annotated[float, Field(ge=0, le=1)] | None = None
    variants: Annotated[tuple[VariantCheck, ...], Field(max_length=8)] = ()


class Variant(_Frozen):
    """One variant of the model, as measured on the device that serves it.

    Attributes:
        name: "fp32" is the model as exported; "fp16" and "int8" use that arithmetic.
        file: its file; None if it was not kept.
        latency_ms: median milliseconds of one prediction at batch 1.
        accuracy: on held-out images, in [0, 1].
        top1_agreement: share of them for which it predicts the same class as fp32.
        images: number of held-out images measured.
        reason: why it was kept or not.
    """

    name: VariantName
    file: ModelFile | None = None
    latency_ms: Annotated[Finite, Field(ge=0)] | None = None
    accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    top1_agreement: Annotated[float, Field(ge=0, le=1)] | None = None
    images: Annotated[int, Field(ge=0)] = 0
    reason: Annotated[str, Field(max_length=500)] = ""


class Gate(_Frozen):
    """The model compared with the previous one in service, on the device's held-out images.

    Attributes:
        against: the version in service at that time.
        images: number of images.
        before: accuracy of that version, in [0, 1].
        accuracy: accuracy of this model.
        allowed: largest loss of accuracy allowed.
    """

    against: Annotated[str, Field(max_length=20)]
    images: Annotated[int, Field(ge=1)]
    before: Annotated[float, Field(ge=0, le=1)]
    accuracy: Annotated[float, Field(ge=0, le=1)]
    allowed: Annotated[float, Field(ge=0, le=1)]


class Manifest(_Frozen):
    """Everything that a runtime and a person need to know about an exported model.

    Attributes:
        takes: "pixels" is uint8 [batch, any height, any width, channels] with preprocessing in the model.
            "tensors" is [batch, *shape] of the type of `input`, with normalisation in the model.
    """

    format: Literal[2] = 2
    federation: Annotated[str, Field(min_length=1, max_length=63)]
    round: Annotated[int, Field(ge=0)]
    spec: Sha256
    classes: Annotated[tuple[str, ...], Field(max_length=10_000)]
    input: InputForm
    takes: Literal["pixels", "tensors"]
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
        """All model files of the directory: first the model as exported, then the kept variants."""
        kept = [one.file for one in self.variants if one.file is not None and one.file != self.model]
        return (self.model, *kept)

    @property
    def served(self) -> Variant:
        """The variant to run."""
        chosen = (one for one in self.variants if one.name == self.serves)
        return next(chosen, Variant(name="fp32", file=self.model))

    @model_validator(mode="after")
    def _takes_its_input(self) -> Manifest:
        if (self.takes == "tensors") != isinstance(self.input, TensorForm):
            raise ValueError(f"takes {self.takes}, which does not match its input: {self.input.kind}")
        if len(self.classes) == 1:
            raise ValueError("classes: needs at least two, or none for tasks other than classification")
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
    """The manifest of `read_signed`, without the description of the check."""
    return read_signed(directory, accept)[0]


def read_signed(directory: Path, accept: Accept | None = None) -> tuple[Manifest, str]:
    """Read and check a model directory's manifest; return it and a description of the signature check.

    Args:
        directory: of the model.
        accept: check of the signature, e.g. from `required`; None for `check_intact`, which accepts any signer and none.

    Raises:
        ManifestError: it is missing, invalid or of a newer format; the message lists every bad field.
        TamperedError: it was altered after signing.
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
    """The bytes of a model file (default: the model as exported), checked against the manifest.

    Raises:
        ManifestError: the file is missing.
        TamperedError: the file does not match the manifest.
    """
    named = file or manifest.model
    path = directory / named.name
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    if len(content) != named.size or digest(content) != named.sha256:
        raise TamperedError(f"{path}: the file does not match {MANIFEST_NAME}; restore it or use another version")
    return content


def read_all(directory: Path, accept: Accept | None = None) -> tuple[Manifest, str]:
    """As `read_signed`, and check every model file in the directory against the manifest.

    Raises:
        ManifestError: no valid manifest, or a missing file.
        TamperedError: a file does not match the manifest.
    """
    manifest, signature = read_signed(directory, accept)
    for file in manifest.files:
        read_model(directory, manifest, file)
    return manifest, signature
