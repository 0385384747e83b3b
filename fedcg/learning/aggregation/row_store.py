"""Where rows of teacher passes lie on disk until a round is merged, so that a killed worker's successor need not make them again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedcg.files import replace_durably

if TYPE_CHECKING:
    from fedcg.learning.method import Weights


class DirectorySpill:
    """Rows of teacher passes, one file per client; a file that is there is complete."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)

    def put(self, client: str, tensors: Weights) -> None:
        """Keep a client's rows durably."""
        from safetensors.torch import save

        rows = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        replace_durably(self._path(client), save(rows))

    def get(self, client: str) -> Weights:
        """A client's rows."""
        from safetensors.torch import load

        rows: Weights = load(self._path(client).read_bytes())
        return rows

    def has(self, client: str) -> bool:
        """Whether a client's rows are complete."""
        return self._path(client).is_file()

    def _path(self, client: str) -> Path:
        return self._directory / f"{client}.safetensors"
