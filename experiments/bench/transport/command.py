"""`fedcg bench transport`: throughput of updates into the coordinator's database, and a round of many sessions."""

from __future__ import annotations

import os
from importlib.metadata import version
from typing import Annotated

import typer

from fedcg.terminal import Result, prints


@prints
def transport_command(
    size: Annotated[
        list[int] | None,
        typer.Option(min=1000, help="Bytes of an artifact; may be given again.  [default: 250000, 57000000]"),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(min=1, max=256, help="Chunks under way; may be given again.  [default: 16, 64]")
    ] = None,
    megabytes: Annotated[int, typer.Option(min=1, help="Small artifacts are repeated up to so much in all.")] = 20,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each case; the median counts.")] = 5,
    sessions: Annotated[
        int, typer.Option(min=0, max=1000, help="Instead: a round of so many sessions of the first size.")
    ] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds with --sessions.")] = 3,
) -> Result:
    """Throughput of updates into the coordinator's database: sha256, signatures, mutual TLS, checks, fsynced receipt.

    With --sessions: seconds of whole rounds without training, from the opened attempt to the stored aggregate.

    Example: fedcg bench transport --size 65536
    """
    from experiments.bench.transport.rounds import LARGE, SMALL, filled, measure, round_of
    from experiments.record import bench_record
    from fedcg.wire.transfer.windows import limits_for

    sizes = size or [SMALL, LARGE]
    record = bench_record("bench transport") | {"load": [round(value, 1) for value in os.getloadavg()]}
    record["versions"]["paho-mqtt"] = version("paho-mqtt")

    def announce(text: str) -> None:
        typer.echo(text, err=True)

    if sessions:
        found = round_of(sessions, sizes[0], rounds, limits_for(), announce)
        record |= {"sessions": sessions, "size": sizes[0], "round_s": found.seconds}
        lines = [f"{sessions} sessions x {sizes[0]} bytes: rounds of {', '.join(map(str, found.seconds))} s"]
    else:
        cases = [filled(one, chunks, megabytes * 1_000_000) for one in sizes for chunks in window or [16, 64]]
        measured = [measure(case, repeats, announce) for case in cases]
        record |= {"repeats": repeats, "cases": [one.as_json() for one in measured]}
        lines = [
            f"{one.case.size:>9} bytes, window {one.case.window:>3}, {one.case.sessions:>2} sessions: {one.mb_per_s:.1f} MB/s"
            for one in measured
        ]
    return record, "\n".join(lines)
