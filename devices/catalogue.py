"""The catalogue of known boxes: reads `catalogue.toml`, looks a Jetson module up, and tells what each kind of box can do."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from devices.profile import Builds, gpu_precisions
from fedcg.config_file import read_toml
from fedcg.errors import FedcgError

GB = 1_000_000_000
_PART_NUMBER = re.compile(r"p\d{4}-\d{4}")


class Soc(BaseModel):
    """A generation of Jetson, by its system on chip."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    family: str
    compute_capability: tuple[int, int]
    can_train: bool
    infers: str
    first_l4t_major: Annotated[int, Field(ge=0)]
    advice: str


class Module(BaseModel):
    """A Jetson module, by its part number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    soc: str
    memory_gb: Annotated[int, Field(gt=0)]

    @property
    def memory_bytes(self) -> int:
        """Installed memory; what the system reports is less, since firmware keeps some."""
        return self.memory_gb * GB


class Kind(BaseModel):
    """A kind of box, in words: a line of the table of known boxes.

    Attributes:
        compatible: how its entry in the device-tree's `compatible` begins; empty without a device-tree, and of a Jetson.
        precisions: number formats that it computes fast, beside others that it emulates.
        detected: what it is known by.
        infers: execution providers of ONNX Runtime there, best first.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    compatible: Annotated[str, Field(exclude=True)] = ""
    compute_capability: str = "-"
    precisions: str
    detected: str
    infers: str
    trains: str


class Catalogue(BaseModel):
    """All known systems on chip, modules and other kinds of box."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    soc: dict[str, Soc]
    module: dict[str, Module]
    power: dict[str, tuple[str, ...]]
    builds: tuple[Builds, ...]
    kind: dict[str, Kind]

    def rows(self) -> tuple[Kind, ...]:
        """The table of known boxes: what is detected of them, and whether they infer and train."""
        return (*(self._row(key, soc) for key, soc in self.soc.items()), *self.kind.values())

    def _row(self, key: str, soc: Soc) -> Kind:
        modules = [module.name.removeprefix("Jetson ") for module in self.module.values() if module.soc == key]
        first = (one.system for one in self.builds if one.soc == key and soc.first_l4t_major in one.jetson_linux)
        trains = f"yes: GPU, or CPU; from {next(first)}" if soc.can_train else "no: Python is too old"
        return Kind(
            name=f"Jetson {soc.family}: {', '.join(modules)}",
            compute_capability=".".join(map(str, soc.compute_capability)),
            precisions=", ".join(gpu_precisions(soc.compute_capability)),
            detected="device-tree",
            infers=soc.infers,
            trains=trains,
        )

    def kind_of(self, compatible: tuple[str, ...]) -> Kind | None:
        """The kind of box that a device-tree's `compatible` list names, where it is no Jetson."""
        return next(
            (
                one
                for one in self.kind.values()
                if one.compatible and any(name.startswith(one.compatible) for name in compatible)
            ),
            None,
        )

    def identify(self, compatible: tuple[str, ...]) -> KnownJetson | None:
        """Find the Jetson that a device-tree's `compatible` list names.

        Args:
            compatible: Entries such as "nvidia,p3768-0000+p3767-0005", most specific first.

        Returns:
            The entry; without a module when only the system on chip is known; None when it is no known Jetson.
        """
        names = [entry.partition(",")[2] for entry in compatible if entry.startswith("nvidia,")]
        soc_key = next((name for name in names if name in self.soc), None)
        if soc_key is None:
            return None
        numbers = [number for name in names for number in _PART_NUMBER.findall(name)]
        module = next(
            (self.module[number] for number in numbers if number in self.module and self.module[number].soc == soc_key),
            None,
        )
        power = next((self.power[number[:5]] for number in numbers if number[:5] in self.power), ())
        return KnownJetson(self.soc[soc_key], module, power, tuple(one for one in self.builds if one.soc == soc_key))


@dataclass(frozen=True)
class KnownJetson:
    """A looked-up Jetson: its generation, its module where the device-tree names one of the catalogue, and the rails whose sum it draws, builds for it."""

    soc: Soc
    module: Module | None
    power: tuple[str, ...] = ()
    builds: tuple[Builds, ...] = ()


@functools.cache
def load_catalogue() -> Catalogue:
    """Read the catalogue that is part of the package."""
    return read_toml(Path(__file__).with_name("catalogue.toml"), Catalogue, FedcgError)
