"""The contract of a data defence, and the list of defences: files of this folder that assign `DEFENCE`. Torch-free.

A defence rewrites a device's training images before training. The number of images and the labels stay the same.
Validation and test images stay real, unless the defence has an input layer, which is applied to every real image before
the device's network. A defence belongs to the device, not to the spec, and works with every method and mechanism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedcg.config_file import nearest, problems_of
from fedcg.files import replace_durably
from fedcg.learning.defences.params import DefenceParams, Size
from fedcg.values import Value

if TYPE_CHECKING:
    import torch

    from fedcg.learning.defences.scrambling import Scrambling
    from fedcg.learning.image_set import ImageSet
    from fedcg.learning.method import Progress
    from fedcg.learning.seeds import Streams

SAMPLES_FILE = "samples.png"
_PACKAGE = "fedcg.learning.defences"


class DefencePlace(Value):
    """The environment of a defence.

    Attributes:
        streams: the device's randomness for this federation.
        progress: called at every step with (phase, step, steps).
        folder: private folder for learned state; None: nothing is stored.
        device: torch device.
        stem: file with the weights of the pretrained first convolution; None: the installed package's.
        grows: whether images are added over time. State learned from the first ones is then reused for later ones, so
            that an image is mixed with the same generated image in every round.
        cohort: randomness of the cohort's secret, equal on all devices that have it; None: no secret.
        warn: called with a sentence, before training, if the defence will protect some images less.
    """

    streams: Streams
    progress: Progress
    folder: Path | None = None
    device: str = "cpu"
    stem: Path | None = None
    grows: bool = False
    cohort: Streams | None = None
    warn: Callable[[str], object] = lambda _: None

    def draws(self, purpose: str, image: torch.Tensor) -> torch.Generator:
        """A stream derived from an image's pixels, so images added later do not affect it."""
        content = hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()
        return self.streams.generator(purpose, content)


class Defended(Value):
    """The training images that replace the real ones.

    Attributes:
        facts: how they were produced.
        picture: a PNG of some of them next to the real ones, or empty. It is private.
    """

    images: ImageSet
    facts: Mapping[str, str]
    picture: bytes

    def keep_picture(self, folder: Path) -> None:
        """Write `samples.png`, if there is a picture, into a private folder, which is created if missing.

        Raises:
            OSError: it can't be written.
        """
        if self.picture:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(folder / SAMPLES_FILE, self.picture)


class Defence(Value):
    """A data defence.

    Attributes:
        name: its file name.
        params_type: its parameters.
        apply: (training images, parameters, place) -> the replacement images.
        is_per_image: whether each output image depends on only one real image, as DP-SGD's ε assumes, and nothing is
            trained.
        check: (parameters, place, size of the images) -> ignored; raises a DefenceError if they are incompatible. It is
            called before images are read. None: all are compatible.
        input_layer: (parameters, place, size of the images) -> a layer that is also applied to validation, test and
            served images; it depends only on these. None: those images stay real.
    """

    name: str
    params_type: type[DefenceParams]
    apply: Callable[[ImageSet, Any, DefencePlace], Defended]
    is_per_image: bool
    check: Callable[[Any, DefencePlace, Size], object] | None = None
    input_layer: Callable[[Any, DefencePlace, Size], Scrambling] | None = None


def defence_names() -> tuple[str, ...]:
    """Names of all defences, sorted. Other modules of the folder do not assign `DEFENCE`."""
    files = (entry for entry in resources.files(_PACKAGE).iterdir() if entry.name.endswith(".py"))
    return tuple(sorted(one.name[:-3] for one in files if "\nDEFENCE = " in one.read_text(encoding="utf-8")))


def defence_of(name: str, values: Mapping[str, object]) -> tuple[Defence, DefenceParams]:
    """A defence and its validated parameters.

    Raises:
        ValueError: unknown defence, or unknown or out-of-range parameters; names each.
    """
    if name not in defence_names():
        raise ValueError(f"defence: unknown name {name!r} ({nearest(name, defence_names())})")
    defence: Defence = import_module(f"{_PACKAGE}.{name}").DEFENCE
    try:
        return defence, defence.params_type.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(problems_of(defence.params_type, error))
        raise ValueError(f"defence_params of {name}: {problems}") from error


def check_defence(name: str | None, values: Mapping[str, object], *, dp_sgd: bool) -> None:
    """Check that a defence supports these parameters, and DP-SGD if used. None is no defence.

    Raises:
        ValueError: it does not; names the setting to change.
    """
    if name is None:
        if values:
            raise ValueError(f"defence_params require a defence: {', '.join(defence_names())}")
        return
    defence, _ = defence_of(name, values)
    if dp_sgd and not defence.is_per_image:
        raise ValueError(
            f"defence {name} learns from all real images, which dp_sgd's epsilon does not cover: leave one of them out"
        )


def defence_label(name: str | None, values: Mapping[str, object]) -> str:
    """A defence with its non-default parameters, such as `antigan-v_e=0.3`; empty without a defence."""
    if name is None:
        return ""
    _, params = defence_of(name, values)
    return "-".join([name, *(f"{key}={value}" for key, value in params.model_dump(exclude_defaults=True).items())])
