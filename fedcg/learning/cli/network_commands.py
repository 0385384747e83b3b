"""`fedcg network`: which networks there are, and what one costs in parameters and on the wire."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import ValidationError

from fedcg.config_file import problems_of
from fedcg.learning import split_names
from fedcg.learning.errors import NetworkError
from fedcg.terminal import Result, prints

if TYPE_CHECKING:
    from fedcg.learning.networks.plans import Sizes

network_app = typer.Typer(no_args_is_help=True, add_completion=False, help="The networks a federation can be made of.")
_MODES = {1: "L", 3: "RGB"}
_RANGES = {"unit": "in (0, 1)", "non_negative": ">= 0"}


@network_app.command("list")
@prints
def list_networks() -> Result:
    """Names of all splits, generators and discriminators.

    Example: fedcg network list
    """
    from fedcg.learning.networks.gan import (
        DISCRIMINATORS,  # torch comes with them: not for --help
        generator_names,
    )

    weights = {name: _weights_here(name) for name in split_names.BACKBONES}
    names = {
        "splits": [*split_names.BUILT_IN, *sorted(split_names.registered())],
        "generators": list(generator_names()),
        "discriminators": sorted(DISCRIMINATORS),
    }
    lines = [f"{kind}: {', '.join(names[kind])}" for kind in ("splits", "generators", "discriminators")]
    lines.append(f"BACKBONE[@STAGE]+project:D, with BACKBONE one of {', '.join(weights)}, or timm:NAME; weights:")
    lines += [
        f"  {name}: {found['file']}, sha256 {found['sha256']}"
        if found
        else f"  {name}: none here (docs/how-to/backbones.md)"
        for name, found in weights.items()
    ]
    return {**names, "backbones": weights}, "\n".join((*lines, "Next: fedcg network show NAME"))


def _weights_here(backbone: str) -> dict[str, str] | None:
    """File and sha256 of a backbone's weights on this machine."""
    try:
        path = split_names.weights_for(backbone, None)
    except NetworkError:
        return None
    return None if path is None else {"file": str(path), "sha256": split_names.weights_digest(path)}


@network_app.command("show")
@prints
def show_network(
    name: Annotated[str, typer.Argument(help="A split: a name that `fedcg network list` prints, or module:function.")],
    image_size: Annotated[int, typer.Option(help="height and width of an image in pixels", min=4, max=1024)] = 32,
    channels: Annotated[int, typer.Option(help="1 for grey images, 3 for colour")] = 3,
    classes: Annotated[int, typer.Option(help="number of classes", min=2, max=10_000)] = 10,
    generator: Annotated[str, typer.Option(help="the generator beside it")] = "mlp",
    discriminator: Annotated[str, typer.Option(help="the discriminator beside it")] = "mlp",
    noise_dim: Annotated[int, typer.Option(help="dimensions of the generator's noise", min=1, max=4096)] = 100,
    freeze: Annotated[str, typer.Option(help="of BACKBONE+project: none, stem, all or all-but:STAGE")] = "none",
) -> Result:
    """The feature's shape, parameters and bytes of every part, and what each method sends.

    Example: fedcg network show lenet5_relu --channels 1 --image-size 28
    """
    from fedcg.learning.errors import LearningError  # torch comes with the networks: not for --help
    from fedcg.learning.networks.plans import sizes_of
    from fedcg.learning.spec import FederationPlan

    if channels not in _MODES:
        raise typer.BadParameter("--channels must be 1 (grey) or 3 (colour)")
    split_names.allow_here(name)
    network: dict[str, str | int] = {
        "split": name,
        "generator": generator,
        "discriminator": discriminator,
        "noise_dim": noise_dim,
    }
    try:
        if freeze != "none":
            network |= {"freeze": freeze, "weights": "0" * 64}  # whichever they are: nothing is filled
        sizes = sizes_of(FederationPlan.model_validate(_plan(network, image_size, channels, classes)))
    except ValidationError as error:
        raise typer.BadParameter("; ".join(problems_of(FederationPlan, error))) from error
    except LearningError:
        raise
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    return {**network, **asdict(sizes)}, _as_text(name, sizes)


def _plan(network: dict[str, str | int], side: int, channels: int, classes: int) -> dict[str, object]:
    # Networks on whole images take pixels in [-1, 1], a backbone's weights ImageNet's normalisation; others take any.
    normalisation = (
        split_names.IMAGENET if split_names.is_projected(str(network["split"])) else ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    )
    mean, std = ([sum(one) / 3] if channels == 1 else list(one) for one in normalisation)
    return {
        "federation": "sizes",
        "classes": [str(label) for label in range(classes)],
        "input": {"mode": _MODES[channels], "height": side, "width": side, "mean": mean, "std": std},
        "network": network,
        "method": "local",
        "rounds": 1,
    }


def _as_text(name: str, sizes: Sizes) -> str:
    shape = " x ".join(map(str, sizes.feature_shape))
    lines = [
        f"{name}: features {shape}, {_RANGES[sizes.feature_range]}; images from {sizes.smallest_side} pixels a side",
        f"  {'part':<16}{'parameters':>12}{'float32 bytes':>15}{'with buffers':>14}",
    ]
    lines += [
        f"  {part.value:<16}{size.parameters:>12,}{size.parameter_bytes:>15,}{size.tensor_bytes:>14,}"
        for part, size in sizes.parts.items()
    ]
    lines.append(f"  {'method':<16}{'bytes up':>12}{'bytes down':>15}   a client a round, before compression")
    lines += [f"  {method:<16}{traffic.up:>12,}{traffic.down:>15,}" for method, traffic in sizes.methods.items()]
    lines += [f"  {method:<16}not with these networks: {problem}" for method, problem in sizes.refusals.items()]
    return "\n".join(lines)
