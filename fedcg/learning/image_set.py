"""Decoded images or other tensors with their labels, their source files, and the files that could not be read."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from fedcg.values import Value


class FileEntry(Value):
    """One image of a data source: its path relative to the root, the sha256 of its content, its label."""

    path: str
    sha256: str
    label: int


class SkippedImage(Value):
    """An image that could not be decoded, and why. It is in no split and no snapshot."""

    file: str
    reason: str


class ImageSet(Value):
    """Decoded images and their labels.

    Attributes:
        images: [N, *tensor_shape] uint8 or float32; images are [N, C, H, W] uint8; [N, K] float32 if replaced by a
            frozen backbone's features.
        labels: [N] int64, indices into `classes`.
        classes: class names in the spec's order.
    """

    images: torch.Tensor
    labels: torch.Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def rows(self, indices: torch.Tensor | Sequence[int]) -> ImageSet:
        """The images at `indices`, in that order."""
        index = torch.as_tensor(indices, dtype=torch.int64)
        return ImageSet(self.images[index], self.labels[index], self.classes)

    def to(self, device: str) -> ImageSet:
        """The same set on another torch device."""
        return ImageSet(self.images.to(device), self.labels.to(device), self.classes)

    def digest(self) -> str:
        """The sha256 of pixels and labels, in hex."""
        digest = hashlib.sha256(self.images.cpu().contiguous().numpy().tobytes())
        digest.update(self.labels.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def label_counts(self) -> tuple[int, ...]:
        """Number of images per class (n_i^y), length C."""
        return tuple(int(count) for count in torch.bincount(self.labels.cpu(), minlength=len(self.classes)))
