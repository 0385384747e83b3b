"""`fedcg bench aggregate`: time and memory of a merge with many clients over those with few."""

from __future__ import annotations

from typing import Annotated

import typer

from fedcg.json_output import print_data


def aggregate_command(
    method: Annotated[
        list[str] | None, typer.Option(help="A method; may be given again.  [default: fedcg, fedmd_cg]")
    ] = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=2, help="Number of clients; may be given again.  [default: 4, 32, 256]")
    ] = None,
    generator: Annotated[str, typer.Option(help="conv (published) or mlp (compact).")] = "mlp",
    iterations: Annotated[int, typer.Option(min=0, help="Student steps; 0 takes the published number.")] = 0,
    teachers: Annotated[int, typer.Option(min=1, help="Different teachers; more take longer before the clock.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the fastest counts.")] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time from the last update to the aggregate, and peak memory: many clients over few.

    Updates arrive no faster than a teacher pass takes; every case runs in a process of its own. The split is lenet5.

    Example: fedcg bench aggregate --clients 50
    """
    from experiments.bench.learning.aggregate import Case, measure, ratios
    from experiments.bench.learning.aggregate import as_json as figures
    from experiments.record import bench_record

    cases = [
        Case(name, count, generator, iterations, teachers, threads)
        for name in method or ["fedcg", "fedmd_cg"]
        for count in sorted(clients or [4, 32, 256])
    ]
    measured = measure(cases, repeats, lambda case: typer.echo(f"{case.method}, {case.clients} clients ...", err=True))
    found = ratios(measured)
    if as_json:
        record = {
            **bench_record("bench aggregate"),
            "repeats": repeats,
            "cases": [figures(one) for one in measured],
            "ratios": found,
        }
        print_data(record)
        return
    for one in measured:
        typer.echo(
            f"{one.case.method:<9} {one.case.clients:>4} clients  {one.seconds:7.2f} s after the last update "
            f"(teacher {one.last_add_s:.2f}, merge {one.finish_s:.2f})  "
            f"+{one.growth_bytes / 2**20:.0f} MiB (peak {one.peak_bytes / 2**20:.0f})"
        )
    for name, ratio in found.items():
        typer.echo(
            f"{name}: time {ratio['time']:.2f}x, peak memory {ratio['peak_memory']:.2f}x "
            f"(growth {ratio['memory_growth']:.2f}x)"
        )
