"""`fedcg bench infer`: predictions on this machine, alone and served. No torch before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import typer

from fedcg.terminal import Result, prints


@prints
def infer_command(
    networks: Annotated[
        list[str] | None, typer.Option("--network", help="Split to measure; again for more.  [default: lenet5]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the median counts.")] = 5,
    requests: Annotated[int, typer.Option(min=100, help="Requests of all 32 callers together, per run.")] = 3000,
    swaps: Annotated[int, typer.Option(min=1, help="New versions under load.")] = 20,
    image_size: Annotated[
        int, typer.Option("--image-size", min=16, max=1024, help="Sides of a picture in pixels.")
    ] = 32,
    quick: Annotated[bool, typer.Option("--quick", help="Little of everything, once: does it run at all?")] = False,
) -> Result:
    """One image, one thread: onnxruntime over eager torch; then a real serving process: ready, memory, latency, also beside training, swaps under load.

    Example: fedcg bench infer --quick
    """
    from dataclasses import asdict
    from importlib.metadata import version

    from experiments.bench.inference.latency import BARS, Plan, measure
    from experiments.record import bench_record

    plan = (
        Plan(images=10, repeats=1, requests=100, swaps=1, side=image_size)
        if quick
        else Plan(repeats=repeats, requests=requests, swaps=swaps, side=image_size)
    )
    found = {name: measure(name, plan, lambda line: typer.echo(line, err=True)) for name in networks or ["lenet5"]}
    record = bench_record("bench infer")
    record["versions"] |= {name: version(name) for name in ("fastapi", "uvicorn")}
    lines = []
    for name, figures in found.items():
        for figure, value in figures.items():
            bar = BARS.get(name, {}).get(figure)
            lines.append(f"{name}.{figure:<18} {_figure_text(value)}" + (f"   ({bar[0]} {bar[1]:g})" if bar else ""))
    return {**record, "setting": asdict(plan), **found}, "\n".join(lines)


def _figure_text(value: object) -> str:
    return ", ".join(f"{name} {one}" for name, one in value.items()) if isinstance(value, Mapping) else str(value)
