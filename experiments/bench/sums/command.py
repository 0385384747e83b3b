"""`fedcg bench sums`: what masked sums cost."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from fedcg.json_output import print_data

DEVICES = (4, 16, 64)


def sums_command(
    devices: Annotated[
        list[int] | None,
        typer.Option(
            min=4, max=1000, help=f"Devices of a sum; again for more.  [default: {', '.join(map(str, DEVICES))}]"
        ),
    ] = None,
    lost: Annotated[
        float, typer.Option(min=0.0, max=0.5, help="Share of them that vanishes after it dealt out keys.")
    ] = 0.1,
    numbers: Annotated[int, typer.Option(min=1, max=10_000_000, help="Numbers of a device.")] = 12_800,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Bytes and processor time of sums that nobody can look into, by the number of devices; each is checked against the plain sum.

    Example: fedcg bench sums --devices 8
    """
    from experiments.bench.sums.sums import measure_sum
    from experiments.record import bench_record

    found = [measure_sum(count, round(lost * count), numbers) for count in devices or DEVICES]
    if as_json:
        print_data({**bench_record("bench sums"), "cases": [asdict(one) for one in found]})
        return
    for one in found:
        typer.echo(
            f"{one.devices:>4} devices, {one.lost} lost: {one.numbers_bytes:,} bytes of numbers, {one.control_up:,} more up, {one.control_down:,} down, "
            f"{one.device_ms:.1f} ms a device, {one.coordinator_ms:.1f} ms the coordinator"
        )
