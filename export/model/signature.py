"""The signature beside a manifest: which device made a model. The manifest names every file by its sha256, so it vouches for all.

`manifest.sig` holds the device's public key and an Ed25519 signature over the manifest's bytes with a domain prefix. Where there is one, a
manifest is accepted only if it is the one that was signed; `required` checks who signed it. The agent notes its public key in
`signing.pub` of the private store, above the models; whoever runs a model from there takes only models of that device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from export.errors import ExportError, InputError, ManifestError, ModelError, TamperedError
from fedcg.errors import NOT_FOUND
from fedcg.files import READABLE, replace_durably

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
    signature = _read(directory)
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
    return partial(_check, wanted=wanted, source=given)


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
    signature = _read(directory)
    if signature is None:
        return "no signature: not checked"
    return _check(directory, manifest, (_verify_key(signature.key),), "the key beside it, which nobody named")


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


def _check(directory: Path, manifest: bytes, wanted: tuple[VerifyKey, ...], source: str) -> str:
    signature, path = _read(directory), directory / SIGNATURE_NAME
    if signature is None:
        raise TamperedError(f"{path}: the model is not signed; only models signed by {source} are used")
    key = next((one for one in wanted if one.hex == signature.key), None)
    if key is None:
        raise TamperedError(f"{path}: signed by {signature.key}, not by {source}: the model of another box")
    if not key.verifies(bytes.fromhex(signature.signature), DOMAIN + manifest):
        raise TamperedError(f"{path}: the signature is not over this {MANIFEST_NAME}; one of them was altered")
    return f"signature checked with {source} (fingerprint {key.hex[:16]})"


def _read(directory: Path) -> Signature | None:
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
