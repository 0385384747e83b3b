"""`fedcg network`: the available networks, and what each costs in parameters and on the wire."""

from __future__ import annotations

import typer

from fedcg.learning import split_names
from fedcg.terminal import Result, command

network_app = typer.Typer(no_args_is_help=True, add_completion=False)


@network_app.callback()
def _group() -> None:
    """The networks that a federation can use."""


@command(network_app, "list")
def list_networks() -> Result:
    """List all splits, generators and discriminators, and the pretrained weights found on this machine.

    Example: fedcg network list
    """
    from fedcg.learning.networks.gan import (
        DISCRIMINATORS,  # imports torch, which --help must not do
        generator_names,
    )

    weights = {name: split_names.weights_here(name) for name in split_names.BACKBONES}
    names = {
        "splits": [*split_names.BUILT_IN, *sorted(split_names.registered())],
        "generators": list(generator_names()),
        "discriminators": sorted(DISCRIMINATORS),
    }
    lines = [f"{kind}: {', '.join(names[kind])}" for kind in ("splits", "generators", "discriminators")]
    lines.append(f"BACKBONE[@STAGE]+project:D, with BACKBONE one of {', '.join(weights)}, or timm:NAME; weights:")
    for name, found in weights.items():
        place = f"{found['file']}, sha256 {found['sha256']}" if found else "not found (docs/how-to/backbones.md)"
        lines.append(f"  {name}: {place}")
    return {**names, "backbones": weights}, "\n".join(lines)
