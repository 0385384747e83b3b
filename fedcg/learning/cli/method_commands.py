"""`fedcg method`: the available methods and their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from fedcg.learning.errors import ExtensionError
from fedcg.learning.registry import method_names
from fedcg.terminal import Result, prints
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

WHEN: Mapping[str, str] = {
    "fedseal": "4 or more devices share a secret: FedAvg's accuracy, and extractors unreadable outside the cohort",
    "analytic": "pretrained frozen backbone, and devices share a secret: one exchange, exact under any data split",
    "fedavg": "all networks may be shared; use aux=1 ema=0.998 server_momentum=0.3",
    "fedsplit": "no shared secret, extractors must stay private: fewest bytes; use aux=1 ema=0.998",
    "fedcg": "no shared secret, extractors must stay private, and labels or image domains differ between sites",
    "fedmd_cg": "as fedcg, if devices may report label counts",
    "fedgh": "devices have different networks and may share the mean features of each class",
    "feddf": "all networks may be shared, and the coordinator has public images of the same kind",
    "fedprox": "baseline: no gain over fedavg in our runs",
    "fedper": "baseline: shares the extractor, keeps the classifier private",
    "fedgen": "baseline for fedcg",
    "ppidsg": "the classifier must stay private too; needs many images and costs accuracy",
    "local": "baseline: nothing is shared",
}
"""When to use each method, from the figures in docs/research/methods.md and docs/research/papers.md."""

method_app = typer.Typer(no_args_is_help=True, add_completion=False, help="The federated methods and their parameters.")


@method_app.command("list")
@prints
def list_methods() -> Result:
    """List all methods and when to use each, recommended ones first.

    Example: fedcg method list
    """
    others = [name for name in method_names() if name not in WHEN]
    found = {**WHEN, **{name: _title(name) for name in others}}
    text = table(("method", "use when"), found.items(), "")
    return found, f"{text}\nFigures: docs/research/methods.md\nNext: fedcg method show NAME"


def _title(name: str) -> str:
    from fedcg.learning.registry import get_method

    try:
        return get_method(name).title
    except ExtensionError as error:
        return f"can't be used: {error}"


@method_app.command("show")
@prints
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
