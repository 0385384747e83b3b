"""The checkpoint of the round that is being trained: one file, worth nothing once its round is committed. Torch-free.

Its content is tensors by name, behind the sha256 of everything after it and a mark of all that the round depends on. A file that is damaged, or of
another round, or of the same round under other settings, is no checkpoint: the round then begins anew.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from fedcg.files import replace_durably
from fedcg.wire.artifacts.tensors import Array

CHECKPOINT_FILE = "checkpoint.bin"
_DIGEST_BYTES = 32


class CheckpointFile:
    """The file `checkpoint.bin` of one private store."""

    def __init__(self, root: Path) -> None:
        self._path = root / CHECKPOINT_FILE

    def load(self, mark: bytes) -> tuple[Mapping[str, Array], str]:
        """The tensors that were kept last under this mark, else none; and what is wrong with the file, else nothing.

        Args:
            mark: 32 bytes, a digest of all that the round depends on.
        """
        try:
            payload = self._path.read_bytes()
            body = payload[_DIGEST_BYTES:]
            if hashlib.sha256(body).digest() != payload[:_DIGEST_BYTES]:
                return {}, f"{self._path} is damaged"
            return (load_safetensors(body[_DIGEST_BYTES:]), "") if body.startswith(mark) else ({}, "")
        except FileNotFoundError:
            return {}, ""
        except (OSError, SafetensorError) as error:
            return {}, str(error)

    def save(self, mark: bytes, tensors: Mapping[str, Array]) -> None:
        """Keep tensors under a mark, in place of earlier ones.

        Raises:
            OSError: the disk is full or broken; the earlier ones are untouched.
        """
        body = mark + save_safetensors(dict(tensors))
        replace_durably(self._path, hashlib.sha256(body).digest() + body)

    def delete(self) -> None:
        """Forget it."""
        self._path.unlink(missing_ok=True)
