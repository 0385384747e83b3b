"""Options that `fedcg demo` and `fedcg simulate` share: one definition of each, and how bad input is told. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from rich.console import Console

from experiments.data.source import DIGITS, Source
from experiments.errors import ExperimentError
from experiments.settings.options import Setting
from fedcg.learning.errors import NetworkError
from fedcg.learning.registry import method_names
from fedcg.learning.split_names import allow_here, check_name

_Values = TypeVar("_Values", bound=BaseModel)

Data = Annotated[
    str, typer.Option(help="digits, digits-domains, a folder, an .npz or torchvision:NAME; see docs/data.md")
]
Clients = Annotated[int, typer.Option(help="number of clients")]
PartitionText = Annotated[str, typer.Option("--partition", help="iid, dirichlet:OMEGA, or domains[:NAME,...]")]
ImagesPerClient = Annotated[int | None, typer.Option(help="at most so many training images per client")]
Rounds = Annotated[int, typer.Option(help="rounds of the federation")]
LocalEpochs = Annotated[int, typer.Option(help="local epochs per round")]
Network = Annotated[
    str,
    typer.Option(help="split of extractor and classifier: a name that `fedcg network list` prints, or module:function"),
]
Generator = Annotated[str, typer.Option(help="conv, mlp, ...")]
ImageSize = Annotated[int, typer.Option(help="images become SIZE x SIZE pixels")]
Flip = Annotated[
    bool, typer.Option("--flip/--no-flip", help="augment by horizontal flips: for photographs, not for digits")
]
Crop = Annotated[
    int,
    typer.Option(metavar="PIXELS", help="augment by random crops of images padded by PIXELS at every side; 0: off"),
]
Quick = Annotated[
    bool,
    typer.Option("--quick/--no-quick", help="larger steps and a shorter server loop than the method's own defaults"),
]


def bad_input(why: str) -> typer.Exit:
    """Exit code 2, with the reason on one line: a path in a box would be broken in the middle."""
    Console(stderr=True, highlight=False).print(f"Error: {why}", markup=False, soft_wrap=True)
    return typer.Exit(2)


def validated(kind: type[_Values], values: dict[str, Any]) -> _Values:
    """The values as a model; bad ones end the command with exit code 2 and are all named."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise bad_input(reasons(error)) from error


def reasons(error: ValidationError) -> str:
    """Every bad value and what is wrong with it, on one line."""
    lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
    return "; ".join(lines)


def check(setting: Setting) -> None:
    """End the command before anything is started when method, network's name or partition can't be used.

    A `module:function` as network was typed by the person who runs the command: this process and its children may import it.
    """
    if setting.method not in method_names():
        raise bad_input(f"no method {setting.method!r}; there are {', '.join(method_names())}")
    allow_here(setting.network)
    try:
        check_name(setting.network)
        setting.checked_partition()
    except (ExperimentError, NetworkError) as error:
        raise bad_input(str(error)) from error


def open_data(setting: Setting) -> Source:
    """The images; the command ends with exit code 2 where they can't be used."""
    try:
        return setting.source()
    except ExperimentError as error:
        raise bad_input(str(error)) from error


def data_text(data: str) -> str:
    """A folder's path made absolute, so that a run can be resumed from anywhere; names of data sets stay."""
    return str(Path(data).resolve()) if data != DIGITS and Path(data).exists() else data


def free_folder(stem: str) -> Path:
    """`./STEM`, or the next `./STEM-N` that does not exist."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 10_000))]
    return next(path for path in map(Path, names) if not path.exists())
