"""Turns the fields of settings into options of a command: one definition of each, in the settings. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from experiments.data.source import DIGITS
from experiments.errors import ExperimentError, OptionError
from experiments.settings.options import Setting
from fedcg.config_file import problems_in_words
from fedcg.errors import FAILED, BadInputError
from fedcg.learning.errors import LearningError, NetworkError
from fedcg.learning.registry import method_names
from fedcg.learning.split_names import RANDOM, allow_here, check_name, is_projected, use_weights

Values = dict[str, Any]
"""Every option of a command by the name of its field, typed or by default."""

# Options that are not called `--FIELD`, or have no `--no-FIELD` beside them; and what stands for a value in the help.
_NAMES = {
    "params": "--set",
    "privacy": "--mechanism",
    "defence_params": "--defence-set",
    "as_json": "--json",
    "force": "--force",
}
_METAVARS = {"crop": "PIXELS", "ray": "[ADDRESS]"}


def options_of(
    *models: type[BaseModel], defaults: Mapping[str, object] | None = None
) -> Callable[[Callable[[Values, frozenset[str]], None]], Callable[..., None]]:
    """Decorator: a command with one option for each field of some models, which is called with (values, typed names).

    Args:
        models: of a field in two of them the later one counts; a field's description is the option's help.
        defaults: of the command, where they differ from the fields'.
    """
    fields = {name: field for model in models for name, field in model.model_fields.items()}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for name, field in fields.items():
        names = [_NAMES[name]] if name in _NAMES else []
        option = typer.Option(*names, help=field.description, metavar=_METAVARS.get(name))
        default = {**(defaults or {})}.get(name, field.get_default())
        parameters.append(
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[field.annotation, option]
            )
        )

    def decorate(function: Callable[[Values, frozenset[str]], None]) -> Callable[..., None]:
        def command(ctx: typer.Context, **values: Any) -> None:
            sources = {name: ctx.get_parameter_source(name) for name in values}
            function(values, frozenset(name for name, source in sources.items() if _is_typed(source)))

        command.__name__, command.__doc__ = function.__name__, function.__doc__
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _is_typed(source: object) -> bool:
    return getattr(source, "name", "") == "COMMANDLINE"


@contextmanager
def bad_input_ends() -> Iterator[None]:
    """Within the block, bad values and data that can't be used are bad input, whatever raised the error.

    Raises:
        BadInputError: in the place of another error, with its reason.
    """
    try:
        yield
    except ValidationError as error:
        raise BadInputError(problems_in_words(error)) from error
    except (ExperimentError, LearningError) as error:
        raise BadInputError(str(error), exit_code=error.exit_code if error.exit_code != FAILED else None) from error


def check(setting: Setting) -> None:
    """Look whether method, network's name and partition can be used.

    A `module:function` as network was typed by the person who runs the command: this process and its children may import it.

    Raises:
        OptionError: no such method.
        NetworkError: no such network here.
        SourceError: not a partition.
    """
    if setting.method not in method_names():
        raise OptionError(f"no method {setting.method!r}; there are {', '.join(method_names())}")
    let_in(setting)
    check_name(setting.network)
    setting.checked_partition()


def let_in(setting: Setting) -> None:
    """Let this process and its children import the network, and read the weights, that a person named as options.

    Raises:
        NetworkError: weights of a network that has none.
    """
    allow_here(setting.network)
    if setting.weights is not None:
        if not is_projected(setting.network):
            raise NetworkError(
                f"--weights are of a backbone with a projection; {setting.network} takes none: leave them out"
            )
        if setting.weights != RANDOM:
            use_weights(Path(setting.weights))


def data_text(data: str) -> str:
    """A folder's path made absolute, so that a run can be resumed from anywhere; names of data sets stay."""
    return str(Path(data).resolve()) if data != DIGITS and Path(data).exists() else data


def free_folder(stem: str) -> Path:
    """`./STEM`, or the next `./STEM-N` that does not exist."""
    names = [stem, *(f"{stem}-{number}" for number in range(2, 10_000))]
    return next(path for path in map(Path, names) if not path.exists())
