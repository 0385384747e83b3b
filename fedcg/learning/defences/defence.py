"""The contract of a data defence, and the defences there are: a file of this folder that assigns `DEFENCE`. Torch-free.

A defence rewrites a device's training images before any method sees them; as many images come out, with the same labels.
Validation and test images stay real, unless the defence has an input layer: that one stands before the device's network wherever it
gets a real image. A defence belongs to the device, not to the spec, and composes with every method and mechanism.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from fedcg.config_file import nearest, problems_of
from fedcg.files import replace_durably
from fedcg.learning.defences.params import DefenceParams, Size

if TYPE_CHECKING:
    import torch

    from fedcg.learning.defences.scrambling import Scrambling
    from fedcg.learning.image_set import ImageSet
    from fedcg.learning.method import Progress
    from fedcg.learning.seeds import Streams

SAMPLES_FILE = "samples.png"
_PACKAGE = "fedcg.learning.defences"


@dataclass(frozen=True)
class DefencePlace:
    """What a defence works with.

    Attributes:
        streams: the device's own randomness for this federation.
        progress: called at every step with (phase, step, steps).
        folder: private folder for what was learned, or None: nothing is kept.
        device: torch device.
        stem: file with the weights of the pretrained first convolution; None: those of the installed package.
        grows: images are added over time. What was learned from the first ones then serves the later ones too, so that an
            image is mixed with one and the same generated image in every round.
        cohort: randomness of the cohort's secret, alike on all devices that have it; None: there is none here.
        warn: called with a sentence, before anything is trained, where the defence will protect some of the images less.
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
        """A stream that follows from an image's pixels: images which are added later change nothing for it."""
        content = hashlib.sha256(image.contiguous().numpy().tobytes()).hexdigest()
        return self.streams.generator(purpose, content)


@dataclass(frozen=True)
class Defended:
    """The training images that take the place of the real ones.

    Attributes:
        facts: about how they were made.
        picture: a PNG of some of them beside the real ones; empty where there are none. It is private.
    """

    images: ImageSet
    facts: Mapping[str, str]
    picture: bytes

    def keep_picture(self, folder: Path) -> None:
        """Write `samples.png`, if there is a picture, into a private folder, which is made where there is none.

        Raises:
            OSError: it can't be written.
        """
        if self.picture:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            replace_durably(folder / SAMPLES_FILE, self.picture)


@dataclass(frozen=True)
class Defence:
    """A data defence.

    Attributes:
        name: of its file.
        params_type: its parameters.
        apply: (training images, parameters, place) -> the images in their place.
        is_per_image: an image that comes out depends on one real image alone, as DP-SGD's ε supposes; nothing is trained.
        check: (parameters, place, size of the images) -> ignored; raises a DefenceError where they do not go together. It is asked before
            there are any images. None: all do.
        input_layer: (parameters, place, size of the images) -> what validation, test and served images go through too; it follows
            from these alone. None: they stay real.
    """

    name: str
    params_type: type[DefenceParams]
    apply: Callable[[ImageSet, Any, DefencePlace], Defended]
    is_per_image: bool
    check: Callable[[Any, DefencePlace, Size], object] | None = None
    input_layer: Callable[[Any, DefencePlace, Size], Scrambling] | None = None


def defence_names() -> tuple[str, ...]:
    """Names of all defences, sorted; other modules of the folder assign no `DEFENCE`."""
    files = (entry for entry in resources.files(_PACKAGE).iterdir() if entry.name.endswith(".py"))
    return tuple(sorted(one.name[:-3] for one in files if "\nDEFENCE = " in one.read_text(encoding="utf-8")))


def defence_of(name: str, values: Mapping[str, object]) -> tuple[Defence, DefenceParams]:
    """A defence and its checked parameters.

    Raises:
        ValueError: no such defence, or parameters that it does not have or that are out of range; names every one.
    """
    if name not in defence_names():
        raise ValueError(f"defence: there is no {name!r} ({nearest(name, defence_names())})")
    defence: Defence = import_module(f"{_PACKAGE}.{name}").DEFENCE
    try:
        return defence, defence.params_type.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(problems_of(defence.params_type, error))
        raise ValueError(f"defence_params of {name}: {problems}") from error


def check_defence(name: str | None, values: Mapping[str, object], *, dp_sgd: bool) -> None:
    """Look whether a defence can be had with these parameters and with DP-SGD; None is no defence.

    Raises:
        ValueError: it can't be; names the setting to change.
    """
    if name is None:
        if values:
            raise ValueError(f"defence_params need a defence: {', '.join(defence_names())}")
        return
    defence, _ = defence_of(name, values)
    if dp_sgd and not defence.is_per_image:
        raise ValueError(
            f"defence {name} learns from all real images, which dp_sgd's epsilon does not cover: leave one of them out"
        )


def defence_label(name: str | None, values: Mapping[str, object]) -> str:
    """A defence with the parameters that differ from its defaults, `antigan-v_e=0.3`; empty without one."""
    if name is None:
        return ""
    _, params = defence_of(name, values)
    return "-".join([name, *(f"{key}={value}" for key, value in params.model_dump(exclude_defaults=True).items())])
