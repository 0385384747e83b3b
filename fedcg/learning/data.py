"""Image data as one uint8 tensor: folders and `.npz` files in, batched normalisation and flips out.

Decodes every image ONCE, exactly as `export.preprocess` does at inference: `convert(mode)`, then a bilinear resize when the
size differs. Knows nothing of rounds, methods or devices of a federation.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fedcg.learning.errors import DataError
from fedcg.learning.spec import ImageForm

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})
MAX_PIXELS = 50_000_000  # the same bound as at inference: larger files are refused before they are decoded


@dataclass(frozen=True)
class FileEntry:
    """One image of a data source: its path relative to the root, the sha256 of its content, its label."""

    path: str
    sha256: str
    label: int


@dataclass(frozen=True)
class ImageSet:
    """Decoded images and their labels.

    Attributes:
        images: [N, C, H, W] uint8.
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

    def label_counts(self) -> tuple[int, ...]:
        """Number of images per class (n_i^y), length C."""
        return tuple(int(count) for count in torch.bincount(self.labels.cpu(), minlength=len(self.classes)))


def list_files(root: Path, classes: Sequence[str]) -> list[tuple[str, int]]:
    """Relative path and label of every image under `root/class/*` or `root/{train,test}/class/*`, sorted by path.

    Raises:
        DataError: no folder, a class folder that the spec does not name, or no image at all.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder")
    splits = [root / name for name in ("train", "test") if (root / name).is_dir() and name not in classes]
    labels = {name: index for index, name in enumerate(classes)}
    found: list[tuple[str, int]] = []
    for base in splits or [root]:
        for folder in sorted(path for path in base.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if folder.name not in labels:
                raise DataError(
                    f"{folder}: the spec has no class {folder.name!r}; its classes are {', '.join(classes)}"
                )
            files = (
                path
                for path in folder.iterdir()
                if path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".")
            )
            found += [(path.relative_to(root).as_posix(), labels[folder.name]) for path in files]
    if not found:
        raise DataError(
            f"{root}: no images; expected {root}/CLASS/*.png or .jpg with CLASS one of {', '.join(classes)}"
        )
    return sorted(found)


def load_folder(
    root: Path, classes: Sequence[str], form: ImageForm, *, subset: Sequence[str] | None = None
) -> tuple[ImageSet, list[FileEntry]]:
    """Decode the images of a folder, or of one `.npz` file, once.

    Args:
        root: `root/class/*`, `root/train/class/*` + `root/test/class/*` (both are loaded; the paths tell them apart), or an
            `.npz` file with `images` (uint8, [N, H, W] or [N, H, W, C]) and `labels` (integers).
        classes: the spec's class names, in order.
        form: the spec's image form.
        subset: relative paths to load, in this order; all when None.

    Returns:
        The images and, row by row, their entries.

    Raises:
        DataError: names the file that is missing, not an image, over the pixel bound, or of an unknown class.
    """
    if root.suffix == ".npz":
        return _load_npz(root, tuple(classes), form, subset)
    listed = list_files(root, classes)
    if subset is not None:
        labels = dict(listed)
        missing = next((path for path in subset if path not in labels), None)
        if missing is not None:
            raise DataError(f"{root / missing}: named by the snapshot, but not there any more")
        listed = [(path, labels[path]) for path in subset]
    pixels = np.empty((len(listed), form.channels, form.height, form.width), dtype=np.uint8)
    entries: list[FileEntry] = []
    for row, (path, label) in enumerate(listed):
        try:
            content = (root / path).read_bytes()
        except OSError as error:
            raise DataError(f"{root / path}: {error.strerror or error}") from error
        pixels[row] = decode_image(content, form, str(root / path))
        entries.append(FileEntry(path, hashlib.sha256(content).hexdigest(), label))
    return _image_set(pixels, [label for _, label in listed], tuple(classes)), entries


def decode_image(content: bytes, form: ImageForm, name: str) -> np.ndarray:
    """Bytes of one image file to [C, H, W] uint8 in the spec's form; the first frame, EXIF orientation ignored.

    Raises:
        DataError: not an image, damaged, or over 50 million pixels; names the file.
    """
    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{name}: {image.width}x{image.height} pixels is over the limit of {MAX_PIXELS}")
            return _fit(image, form)
    except UnidentifiedImageError as error:
        raise DataError(f"{name}: not an image") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name}: damaged image ({error})") from error


def _fit(image: Image.Image, form: ImageForm) -> np.ndarray:
    fitted = image.convert(form.mode)
    if fitted.size != (form.width, form.height):
        fitted = fitted.resize((form.width, form.height), Image.Resampling.BILINEAR)
    array = np.asarray(fitted, dtype=np.uint8)
    return array[None] if form.channels == 1 else np.ascontiguousarray(array.transpose(2, 0, 1))


def _load_npz(
    path: Path, classes: tuple[str, ...], form: ImageForm, subset: Sequence[str] | None
) -> tuple[ImageSet, list[FileEntry]]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            images, labels = arrays["images"], arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path}: not an .npz with the arrays `images` and `labels` ({error})") from error
    if (
        images.dtype != np.uint8
        or images.ndim not in (3, 4)
        or labels.shape != images.shape[:1]
        or labels.dtype.kind not in "iu"
    ):
        raise DataError(f"{path}: images must be uint8 [N, H, W] or [N, H, W, C], labels integers [N]")
    if len(labels) == 0 or int(labels.min()) < 0 or int(labels.max()) >= len(classes):
        raise DataError(f"{path}: labels must lie in 0..{len(classes) - 1} and there must be at least one image")
    names = [f"{path.name}#{row}" for row in range(len(labels))]
    rows = list(range(len(labels)))
    if subset is not None:
        index = {name: row for row, name in enumerate(names)}
        missing = next((name for name in subset if name not in index), None)
        if missing is not None:
            raise DataError(f"{path}: the snapshot names {missing}, which is not there any more")
        rows = [index[name] for name in subset]
    raw = [images[row][..., 0] if images[row].ndim == 3 and images[row].shape[2] == 1 else images[row] for row in rows]
    pixels = np.stack([_fit(Image.fromarray(np.ascontiguousarray(one)), form) for one in raw])
    entries = [
        FileEntry(names[row], hashlib.sha256(np.ascontiguousarray(images[row]).tobytes()).hexdigest(), int(labels[row]))
        for row in rows
    ]
    return _image_set(pixels, [entry.label for entry in entries], classes), entries


def _image_set(pixels: np.ndarray, labels: Sequence[int], classes: tuple[str, ...]) -> ImageSet:
    return ImageSet(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64), classes)


def split_by_hash(entries: Sequence[FileEntry], fractions: Mapping[str, float]) -> dict[str, list[FileEntry]]:
    """Split by content hash: stable when data is added, and two copies of one image never end on two sides.

    Args:
        entries: the images.
        fractions: split name to its share, in order; shares sum to 1.

    Raises:
        ValueError: shares that do not sum to 1 or are negative.
    """
    if abs(sum(fractions.values()) - 1.0) > 1e-9 or min(fractions.values()) < 0:
        raise ValueError(f"the shares must be non-negative and sum to 1, not {dict(fractions)}")
    names = list(fractions)
    bounds = np.cumsum([fractions[name] for name in names])
    result: dict[str, list[FileEntry]] = {name: [] for name in names}
    for entry in entries:
        position = int(entry.sha256[:13], 16) / 16**13
        result[names[min(int(np.searchsorted(bounds, position, side="right")), len(names) - 1)]].append(entry)
    return result


def normalise(images: torch.Tensor, form: ImageForm) -> torch.Tensor:
    """`(x / 255 - mean) / std` per channel, batched on the images' device.

    Args:
        images: [B, C, H, W] uint8.
        form: the spec's image form.

    Returns:
        [B, C, H, W] float32.
    """
    mean = torch.tensor(form.mean, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    std = torch.tensor(form.std, dtype=torch.float32, device=images.device).view(1, -1, 1, 1)
    return (images.to(torch.float32) / 255.0 - mean) / std


def flip_at_random(images: torch.Tensor, flips: torch.Tensor) -> torch.Tensor:
    """Mirror left-right the images whose entry of `flips` ([B] bool) is set."""
    return torch.where(flips.view(-1, 1, 1, 1).to(images.device), images.flip(-1), images)


def usable_rows(count: int, batch_size: int) -> int:
    """How many of `count` rows an epoch uses: all, less a last batch of one, which BatchNorm cannot train on.

    Raises:
        DataError: fewer than two rows.
    """
    if count < 2:
        raise DataError(f"{count} training images: at least 2 are needed")
    return count - 1 if count % batch_size == 1 else count


def batches(count: int, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Index tensors of one shuffled epoch over `count` rows; a last batch of one is dropped.

    Args:
        count: number of rows.
        batch_size: rows per batch, the last may be smaller.
        generator: the stream of the shuffle.
    """
    order = torch.randperm(count, generator=generator)[: usable_rows(count, batch_size)]
    yield from order.split(batch_size)
