"""`fedcg bench codec`: bytes, error and agreement of every codec."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fedcg.json_output import print_data
from fedcg.wire.parts import DEFAULT_AGGREGATE_CODEC, DEFAULT_UPDATE_CODEC

GENERATORS = ("mlp", "mlp_small", "mlp3", "conv_small")


def codec_command(
    generator: Annotated[
        list[str] | None, typer.Option(help=f"A generator; again for more.  [default: {', '.join(GENERATORS)}]")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients that train on the digits.")] = 3,
    rounds: Annotated[int, typer.Option(min=2, help="Rounds of training.")] = 3,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs a round.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Root of all randomness.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bytes of an update and of an aggregate with every codec, the largest error of a number, and how often top-1 stays.

    Agreement: share of held-out features to which the decoded classifier gives the same class as the original.

    Example: fedcg bench codec --clients 4
    """
    import torch

    from experiments.bench.codec.codec import Teachers, cases
    from experiments.record import bench_record

    torch.set_num_threads(threads)
    teachers = Teachers(clients, rounds, epochs, seed)
    found = cases(teachers, list(generator or GENERATORS), lambda line: typer.echo(line, err=True))
    if as_json:
        record = {
            **bench_record("bench codec"),
            "setting": vars(teachers),
            "defaults": {"codec": DEFAULT_UPDATE_CODEC, "aggregate_codec": DEFAULT_AGGREGATE_CODEC},
            "cases": [asdict(case) for case in found],
        }
        print_data(record)
        return
    for case in found:
        typer.echo(
            f"{case.generator:<10} {case.of:<9} {case.codec:<9} {case.bytes:>9,} bytes, error at most {case.max_error:.2e}, "
            f"top-1 agrees on {case.agreement:.2%} of {case.features} held-out features, "
            f"{case.agreement_generated:.2%} of generated ones"
        )
