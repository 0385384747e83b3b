"""Finds the images that a person names. What reads a kind of source is imported only for that kind."""

from __future__ import annotations

from pathlib import Path

from experiments.data.source import DIGITS, DIGITS_DOMAINS, TORCHVISION, Source, digits
from fedcg.learning.data.sources import is_array_source


def open_source(text: str) -> Source:
    """Open the images that a person names.

    Args:
        text: `digits`; `digits-domains`; `torchvision:NAME[:ROOT]`; an `.npz`; or a folder: of class folders, of `train`,
            `test` and perhaps `val` of such, of domains of either, or with IDX or CIFAR files. See docs/data.md.

    Raises:
        SourceError: nothing usable; names the file or folder and what was expected.
    """
    if text == DIGITS:
        return digits()
    if text == DIGITS_DOMAINS:
        from experiments.data.digit_domains import digits_domains

        return digits_domains()
    if text.startswith(TORCHVISION):
        from experiments.data.torchvision_sources import named_source

        return named_source(text.removeprefix(TORCHVISION))
    path = Path(text)
    if is_array_source(path):
        from experiments.data.array_sources import file_source

        return file_source(path)
    from experiments.data.folder_sources import folder_source

    return folder_source(path)
