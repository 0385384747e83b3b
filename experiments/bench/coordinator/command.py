"""`fedcg bench coordinator`: rounds of a whole coordinator with many sessions, its memory, what watchers and masked sums cost."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from fedcg.terminal import Result, prints


@prints
def coordinator_command(
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="MQTT sessions, one per device.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; with --watchers, rounds of one turn.")] = 5,
    watchers: Annotated[
        int, typer.Option(min=0, max=50, help="Watchers of the page in every second turn of rounds.")
    ] = 0,
    turns: Annotated[int, typer.Option(min=1, help="With --watchers: so many turns without and with them.")] = 3,
    out: Annotated[
        Path | None, typer.Option(help="A folder for coordinator.json and a plot of the memory, memory.png.")
    ] = None,
    sum_devices: Annotated[
        list[int] | None,
        typer.Option(min=4, max=1000, help="Instead: masked sums of so many devices; again for more."),
    ] = None,
    lost: Annotated[
        float,
        typer.Option(min=0.0, max=0.5, help="With --sum-devices: share of them that vanishes after it sent keys."),
    ] = 0.1,
    numbers: Annotated[
        int, typer.Option(min=1, max=10_000_000, help="With --sum-devices: numbers of a device.")
    ] = 12_800,
) -> Result:
    """Lost updates, seconds from the last update to the next offer, and memory of a coordinator and a Mosquitto of its own.

    The sessions send a recorded update of the method fedcg, so no device trains; the aggregation worker merges all of them.
    With --sum-devices: bytes and processor time of masked sums, each compared with the plain sum.

    Example: fedcg bench coordinator --sessions 50
    """
    if sum_devices:
        return _sums(sum_devices, lost, numbers)
    from coordinator.storage.store import Store
    from experiments.bench.coordinator.figures import cost_of_watchers, draw_memory, growth_mb, rounds_of
    from experiments.bench.coordinator.rounds import Setting, run_rounds
    from experiments.bench.transport.broker import new_home
    from experiments.record import bench_record
    from fedcg.files import READABLE, replace_durably

    if watchers and rounds < 3:
        raise typer.BadParameter(
            "watchers come in the first round of a turn, and no offer follows the last one: give 3 or more with --watchers",
            param_hint="--rounds",
        )

    def announce(text: str) -> None:
        typer.echo(text, err=True)

    setting = Setting(sessions, rounds, watchers, turns if watchers else 1)
    record: dict[str, Any] = {
        **bench_record("bench coordinator"),
        "command": "fedcg bench coordinator "
        + " ".join(f"--{name} {value}" for name, value in asdict(setting).items()),
        "load": [round(value, 1) for value in os.getloadavg()],
        "setting": asdict(setting),
    }
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        home = new_home(Path(folder))
        run = asyncio.run(run_rounds(home, setting, announce))
        with closing(Store.of(home)) as store:
            found = rounds_of(store, run, setting)
    record |= {
        "updates": run.updates(),
        "growth_mb_per_round": None if watchers else growth_mb(found),
        "rounds": [asdict(each) for each in found],
    }
    if watchers:
        record["watching"] = {"pages": run.pages, "events": run.events, **cost_of_watchers(found, rounds)}
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        replace_durably(out / "coordinator.json", json.dumps(record, indent=1) + "\n", READABLE)
        draw_memory(found, out / "memory.png", f"{sessions} sessions: memory after each round")
    return record, "\n".join(_lines(record))


def _sums(devices: list[int], lost: float, numbers: int) -> Result:
    from experiments.bench.coordinator.sums import measure_sum
    from experiments.record import bench_record

    found = [measure_sum(count, round(lost * count), numbers) for count in devices]
    lines = [
        f"{one.devices:>4} devices, {one.lost} lost: {one.numbers_bytes:,} bytes of numbers, {one.control_up:,} more up, {one.control_down:,} down, "
        f"{one.device_ms:.1f} ms a device, {one.coordinator_ms:.1f} ms the coordinator"
        for one in found
    ]
    return {**bench_record("bench coordinator"), "sums": [asdict(one) for one in found]}, "\n".join(lines)


def _lines(record: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{count} updates {name}" for name, count in record["updates"].items())
    for each in record["rounds"]:
        offer = (
            "" if each["next_offer_s"] is None else f", next offer {each['next_offer_s']:.2f} s after the last update"
        )
        memory = " + ".join(f"{value:.0f}" for value in each["memory_mb"])
        yield f"round {each['round']}: {each['seconds']:.2f} s{offer}; {memory} MB (coordinator + worker)"
    if record["growth_mb_per_round"] is not None:
        yield f"memory grows by {record['growth_mb_per_round']:.2f} MB a round"
    for name in ("seconds", "next_offer_s", "processor_s") if "watching" in record else ():
        cost = record["watching"][name]
        yield f"{name} with over without watchers: {cost['ratio']:.2f} ({', '.join(map(str, cost['ratios']))})"
