"""`fedcg method`: the available methods and their parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedcg.learning.errors import ExtensionError
from fedcg.learning.method_choice import method_choice
from fedcg.learning.registry import method_names
from fedcg.terminal import Result, command
from fedcg.text_output import table
from fedcg.wire.parts import DEFAULT_ALLOW_UPLOAD

if TYPE_CHECKING:
    from fedcg.learning.method import Method

_UNSEEN = "; only the cohort can read the mean; single updates stay hidden, so there are no norms and no comparisons"
_LABEL_COUNTS = {
    "never": "",
    "optional": ", and label counts where a device allows it",
    "required": ", and label counts",
}

method_app = typer.Typer(no_args_is_help=True, add_completion=False, help="The federated methods and their parameters.")


@command(method_app, "list")
def list_methods() -> Result:
    """List all methods and when to use each, recommended ones first.

    Example: fedcg method list
    """
    when = method_choice()["when"]
    others = [name for name in method_names() if name not in when]
    found = {**when, **{name: _title(name) for name in others}}
    text = table(("method", "use when"), found.items(), "")
    return found, f"{text}\nFigures: docs/research/methods.md\nNext: fedcg method show NAME"


def _title(name: str) -> str:
    from fedcg.learning.registry import get_method

    try:
        return get_method(name).title
    except ExtensionError as error:
        return f"can't be used: {error}"


@command(method_app, "show")
def show_method(name: Annotated[str, typer.Argument(help="A name that `fedcg method list` prints.")]) -> Result:
    """Show what a method shares, what it keeps private, and its parameters with their defaults.

    Example: fedcg method show fedcg
    """
    from fedcg.learning.registry import get_method  # imports torch, which --help must not do

    method = get_method(name)
    return _described(method), _as_text(method)


def _described(method: Method) -> dict[str, object]:
    fields = method.params_type.model_fields
    return {
        "name": method.name,
        "title": method.title,
        "shared_up": sorted(part.value for part in method.payload.up),
        "shared_down": sorted(part.value for part in method.payload.down),
        "private": sorted(part.value for part in method.payload.private),
        "label_counts": method.needs.label_counts.value,
        "needs_public": method.needs.public,
        "needs_cohort": method.needs.cohort,
        "sealed": sorted(part.value for part in method.payload.sealed),
        "sealable": sorted(part.value for part in method.payload.sealable),
        "params": {key: {"default": field.default, "about": field.description or ""} for key, field in fields.items()},
    }


def _as_text(method: Method) -> str:
    def names(parts: frozenset[object]) -> str:
        return ", ".join(sorted(str(getattr(part, "value", part)) for part in parts)) or "nothing"

    fields = method.params_type.model_fields
    width = max(len(key) for key in fields)
    lines = [
        f"{method.name}: {method.title}",
        f"  uploads: {names(frozenset(method.payload.up - method.payload.sealed))}"
        + _LABEL_COUNTS[method.needs.label_counts.value],
        f"  downloads: {names(frozenset(method.payload.down - method.payload.sealed))}",
        f"  stays on the device: {names(frozenset(method.payload.private))}",
        *(
            f"  {part.value}: {part.meaning}"
            for part in sorted(method.payload.up - method.payload.sealed - DEFAULT_ALLOW_UPLOAD)
        ),
        *(["  needs unlabelled public images on the coordinator"] if method.needs.public else []),
        *(["  needs the cohort secret on every device"] if method.needs.cohort else []),
        *([f"  sealed: {names(frozenset(method.payload.sealed))}{_UNSEEN}"] if method.payload.sealed else []),
        *([f"  a plan can seal: {names(frozenset(method.payload.sealable))}"] if method.payload.sealable else []),
        "  parameters (--set key=value):",
    ]
    lines += [f"    {key:<{width}}  {field.default!s:<10}  {field.description or ''}" for key, field in fields.items()]
    return "\n".join(lines)
