"""Reads image data (folders and `.npz`) into one uint8 tensor, and normalises batches.

Decodes every image ONCE, exactly as for inference (`fedcg.imaging`). Independent of rounds, methods and devices.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedcg.learning.data import sources
from fedcg.learning.data.array_files import ArrayData
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import FileEntry, ImageSet, SkippedImage
from fedcg.learning.spec import ImageForm, InputForm, TensorForm
from fedcg.values import Value

# Shares for images that the source does not split itself, by the splits that it has.
_SHARES = {
    frozenset[str](): {"train": 0.8, "val": 0.1, "test": 0.1},
    frozenset({"test"}): {"train": 0.9, "val": 0.1},
    frozenset({"val"}): {"train": 0.9, "test": 0.1},
    frozenset({"val", "test"}): {"train": 1.0},
}


class LocalImages(Value):
    """The images of a data source.

    Attributes:
        images: the decoded images.
        entries: the source of each row.
        skipped: images that could not be decoded.
    """

    images: ImageSet
    entries: list[FileEntry]
    skipped: tuple[SkippedImage, ...] = ()


def given_split(path: str, classes: Sequence[str]) -> str | None:
    """The split that a source assigns to an image (`train`, `val` or `test`, the first part of its path), or None."""
    first = path.partition("/")[0]
    return first if first in sources.SPLITS and first not in classes else None


def read_images(
    root: Path, classes: Sequence[str], form: InputForm, *, subset: Sequence[str] | None = None
) -> LocalImages:
    """Decode the images of a data source once. Undecodable images are skipped and named.

    Args:
        root: `root/class/*`; `root/train/class/*` and `root/test/class/*`, optionally `root/val/class/*` (all are
            loaded and distinguished by path); or an `.npz`.
        classes: the spec's class names, in order; labels of arrays are indices into them.
        form: the spec's input form.
        subset: paths of the entries to load, in this order, which must all be readable; None: all.

    Raises:
        DataError: a file is missing or of an unknown class (the message names it), no image can be decoded, or one of
            `subset` can't.
    """
    if isinstance(form, TensorForm) and not sources.is_array_source(root):
        raise DataError(f"{root}: tensors must be in an .npz with `inputs` [N, ...] and `labels` [N]")
    if sources.is_array_source(root):
        return from_arrays(sources.read_arrays(root, form), root, tuple(classes), form, subset)
    assert isinstance(form, ImageForm)
    return _from_files(root, tuple(classes), form, subset)


def _from_files(root: Path, classes: tuple[str, ...], form: ImageForm, subset: Sequence[str] | None) -> LocalImages:
    listed = sources.list_files(root, classes)
    if subset is not None:
        labels = dict(listed)
        missing = next((path for path in subset if path not in labels), None)
        if missing is not None:
            raise DataError(f"{root / missing}: in the snapshot, but the file is gone")
        listed = [(path, labels[path]) for path in subset]
    pixels = sources.empty_rows(len(listed), form)
    entries: list[FileEntry] = []
    skipped: list[SkippedImage] = []
    for path, label in listed:
        try:
            content = sources.read_image(root / path)
            pixels[len(entries)] = sources.decode_image(content, form, str(root / path))
        except OSError as error:
            raise DataError(f"{root / path}: {error.strerror or error}") from error
        except DataError as error:
            if subset is not None:
                raise
            skipped.append(SkippedImage(path, str(error)))
            continue
        entries.append(FileEntry(path, hashlib.sha256(content).hexdigest(), label))
    if not entries:
        raise DataError(f"{skipped[0].reason}; none of the {len(skipped)} images of {root} can be read")
    return LocalImages(
        _image_set(pixels[: len(entries)], [one.label for one in entries], classes), entries, tuple(skipped)
    )


def from_arrays(
    data: ArrayData, root: Path, classes: tuple[str, ...], form: InputForm, subset: Sequence[str] | None
) -> LocalImages:
    """`read_images` for arrays. Rows are named by file and number, prefixed with the part if the source has several."""
    parts = data.parts()
    places: dict[str, tuple[str, int]] = {}
    for part, found in parts.items():
        if int(found.labels.max()) >= len(classes):
            raise DataError(
                f"{found.file}: label {int(found.labels.max())}; labels must lie in 0..{len(classes) - 1}, "
                f"for the spec's classes {', '.join(classes[:20])}"
            )
        prefix = f"{part}/" if len(parts) > 1 else ""
        places |= {f"{prefix}{found.file.name}#{row}": (part, row) for row in range(len(found))}
    names = list(places) if subset is None else list(subset)
    missing = next((name for name in names if name not in places), None)
    if missing is not None:
        raise DataError(f"{root}: {missing} is in the snapshot, but no longer in the data")
    pixels = sources.empty_rows(len(names), form)
    entries: list[FileEntry] = []
    for number, name in enumerate(names):
        part, row = places[name]
        image = parts[part].images[row]
        pixels[number] = sources.fit_row(image, form)
        digest = hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()
        entries.append(FileEntry(name, placed(digest, parts[part].blocks, row), int(parts[part].labels[row])))
    return LocalImages(_image_set(pixels, [entry.label for entry in entries], classes), entries)


def _image_set(pixels: np.ndarray, labels: Sequence[int], classes: tuple[str, ...]) -> ImageSet:
    return ImageSet(torch.from_numpy(pixels), torch.tensor(labels, dtype=torch.int64), classes)


def placed(digest: str, blocks: Sequence[str], row: int) -> str:
    """The digest by which `split_by_hash` places a row. With blocks, it starts with the digest of the row's block."""
    return blocks[row][:16] + digest[16:] if blocks else digest


def split_by_hash(entries: Sequence[FileEntry], fractions: Mapping[str, float]) -> dict[str, list[FileEntry]]:
    """Split by content hash: stable when data is added, and copies of one image stay in one split.

    Args:
        entries: the images.
        fractions: share of each split by name, in order; shares sum to 1.
    """
    names = list(fractions)
    bounds = np.cumsum([fractions[name] for name in names])
    result: dict[str, list[FileEntry]] = {name: [] for name in names}
    for entry in entries:
        position = int(entry.sha256[:13], 16) / 16**13
        result[names[min(int(np.searchsorted(bounds, position, side="right")), len(names) - 1)]].append(entry)
    return result


def split_source(root: Path, entries: Sequence[FileEntry], classes: Sequence[str]) -> dict[str, str]:
    """The split of every image of a source, by path, as a device uses it: `train`, `val` or `test`.

    If the source has `train/` and `test/`, `test/` is the held-out set and `train/` is split 90/10 into train and val,
    unless there is also a `val/` (empty folders count). Otherwise everything is split 80/10/10. The split uses content
    hashes, so adding data never moves an image.
    """
    named = {entry.path: given_split(entry.path, classes) for entry in entries}
    there = set(named.values()) - {None}
    if root.is_dir():
        there |= {name for name in sources.SPLITS if (root / name).is_dir()} - set(classes)
    given = frozenset({"val", "test"} & there) if "train" in there else frozenset[str]()
    where = {path: split for path, split in named.items() if split is not None and split in given}
    divided = split_by_hash([entry for entry in entries if entry.path not in where], _SHARES[given])
    return where | {entry.path: name for name, chosen in divided.items() for entry in chosen}


def normalise(images: torch.Tensor, form: InputForm) -> torch.Tensor:
    """`(x - mean) / std` along dimension 1, with x / 255 instead of x for uint8; batched on the inputs' device.

    Args:
        images: [B, *tensor_shape] uint8 or float32; or [B, K] float32, a frozen backbone's features of images, which
            are returned unchanged.
        form: the spec's input form.

    Returns:
        [B, *tensor_shape] float32.
    """
    if images.ndim != 1 + len(form.tensor_shape):
        return images
    inputs = images.to(torch.float32) / 255.0 if images.dtype == torch.uint8 else images
    if not form.mean:
        return inputs
    mean, std = (_per_channel(values, inputs.ndim, inputs.device) for values in (form.mean, form.std))
    return (inputs - mean) / std


@functools.lru_cache(maxsize=16)
def _per_channel(values: tuple[float, ...], dimensions: int, device: torch.device) -> torch.Tensor:
    # Cached: a copy to a GPU would stall a step, and can't be part of a CUDA graph.
    return torch.tensor(values, dtype=torch.float32, device=device).view(1, -1, *[1] * (dimensions - 2))


def usable_rows(count: int, batch_size: int) -> int:
    """How many of `count` rows an epoch uses: all, except a last batch of one row, on which BatchNorm can't train.

    Raises:
        DataError: fewer than two rows.
    """
    if count < 2:
        raise DataError(f"{count} training images: at least 2 are needed")
    return count - 1 if count % batch_size == 1 else count
