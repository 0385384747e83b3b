"""The embedded digits in five domains, made without downloads: a small stand-in for Digit5.

Every domain has originals of its own (each scan is in exactly one), and changes them in its way: `plain`; `inverted`; `blended`
with patches of the two photographs that come with scikit-learn, as MNIST-M does; `thick` strokes; `rotated` by 25 to 65
degrees. All are colour, 16 x 16. Domains and their images are the same in every run: the seed of a run only deals them out.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFilter

from experiments.data.lazy_images import rows_per_class
from experiments.data.source import DIGITS_DOMAINS, Source, by_domain, read_digits, sklearn_file

SIDE = 16
_SEED = 5  # which scan is in which domain, patches and angles
_ANGLES = (25.0, 65.0)

Grey = NDArray[np.uint8]


def digits_domains() -> Source:
    """Five domains of about 359 digits each; no test part, so that a deal halves each domain."""
    scans, labels = read_digits()
    generator = np.random.default_rng(_SEED)
    changes = _changes(generator)
    order = np.concatenate([generator.permutation(np.flatnonzero(labels == label)) for label in range(10)])
    domains = []
    for number, (name, change) in enumerate(changes.items()):
        rows = np.sort(order[number :: len(changes)])
        pixels = np.stack([change(_enlarged(scans[row])) for row in rows])
        pictures = rows_per_class(pixels, labels[rows], 10, f"{DIGITS_DOMAINS}/{name}", stem=f"{name}-")
        domains.append(Source(name, tuple("0123456789"), pictures, None))
    return by_domain(DIGITS_DOMAINS, domains)


def _changes(generator: np.random.Generator) -> dict[str, Callable[[Grey], Grey]]:
    """What each domain does to a [SIDE, SIDE] grey digit: [SIDE, SIDE, 3]."""
    photographs = _photographs()

    def blended(digit: Grey) -> Grey:
        photograph = photographs[int(generator.integers(len(photographs)))]
        top, left = (int(generator.integers(size - SIDE + 1)) for size in photograph.shape[:2])
        patch = photograph[top : top + SIDE, left : left + SIDE].astype(np.int16)
        # MNIST-M: the digit is the absolute difference to a patch of a photograph
        return np.abs(patch - digit[..., None].astype(np.int16)).astype(np.uint8)

    def rotated(digit: Grey) -> Grey:
        angle = float(generator.uniform(*_ANGLES)) * (1 if generator.random() < 0.5 else -1)
        return _coloured(np.asarray(Image.fromarray(digit).rotate(angle, Image.Resampling.BILINEAR)))

    return {
        "plain": _coloured,
        "inverted": lambda digit: _coloured(255 - digit),
        "blended": blended,
        "thick": lambda digit: _coloured(np.asarray(Image.fromarray(digit).filter(ImageFilter.MaxFilter(3)))),
        "rotated": rotated,
    }


def _photographs() -> list[Grey]:
    """The two photographs, at an eighth of their size, so that a patch shows more than one colour."""
    files = [sklearn_file(f"images/{name}.jpg") for name in ("china", "flower")]
    return [np.asarray(Image.open(file).reduce(8)) for file in files]


def _enlarged(digit: Grey) -> Grey:
    return np.asarray(Image.fromarray(digit).resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _coloured(digit: Grey) -> Grey:
    return np.repeat(digit[..., None], 3, axis=2)
