"""The contract of a data defence, and the defences there are: a file of this folder that assigns `DEFENCE`. Torch-free.

A defence rewrites a device's training images before any method sees them; as many images come out, with the same labels.
Validation and test images stay real. It belongs to the device, not to the spec, and composes with every method and mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from fedcg.config_file import nearest

if TYPE_CHECKING:
    from fedcg.learning.image_set import ImageSet
    from fedcg.learning.method import Progress
    from fedcg.learning.seeds import Streams

SAMPLES_FILE = "samples.png"
_PACKAGE = "fedcg.learning.defences"


class DefenceParams(BaseModel):
    """Base of a defence's parameters; an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True)
class DefencePlace:
    """What a defence works with.

    Attributes:
        streams: the device's own randomness for this federation.
        progress: called at every step with (phase, step, steps).
        folder: private folder for what was learned and for sample pictures, or None: nothing is kept.
        device: torch device.
        stem: file with the weights of the pretrained first convolution; None: those of the installed package.
        grows: images are added over time. What was learned from the first ones then serves the later ones too, so that an
            image is mixed with one and the same generated image in every round.
    """

    streams: Streams
    progress: Progress
    folder: Path | None = None
    device: str = "cpu"
    stem: Path | None = None
    grows: bool = False


@dataclass(frozen=True)
class Defended:
    """The training images that take the place of the real ones, and facts about how they were made."""

    images: ImageSet
    facts: Mapping[str, str]


@dataclass(frozen=True)
class Defence:
    """A data defence.

    Attributes:
        name: of its file.
        params_type: its parameters.
        apply: (training images, parameters, place) -> the images in their place.
        is_per_image: an image that comes out depends on one real image alone, as DP-SGD's ε supposes.
    """

    name: str
    params_type: type[DefenceParams]
    apply: Callable[[ImageSet, Any, DefencePlace], Defended]
    is_per_image: bool


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
        known = tuple(defence.params_type.model_fields)
        problems = (
            f"{key}: there is no such parameter ({nearest(key, known)})"
            if item["type"] == "extra_forbidden"
            else f"{key}: {item['msg']}"
            for item in error.errors(include_url=False)
            for key in [".".join(map(str, item["loc"]))]
        )
        raise ValueError(f"defence_params of {name}: {'; '.join(problems)}") from error


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
