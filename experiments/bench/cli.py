"""`fedcg bench` and its commands: options, what is printed, and the record.

Every measurement is imported when its command runs, so no command's help loads torch. Other packages register further
measurements in the entry-point group `fedcg.benches`.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from experiments.record import bench_record, write_record
from fedcg.cli import LazyGroup
from fedcg.errors import BadInputError
from fedcg.learning.spec import NetworkChoice
from fedcg.terminal import Result, print_data, prints


class BenchGroup(LazyGroup):
    """The measurements of all packages."""

    entry_point_group = "fedcg.benches"


app = typer.Typer(
    cls=BenchGroup,
    no_args_is_help=True,
    add_completion=False,
    help="Measure this machine: ratios of two things run in one go. Timings belong here, never in tests.",
)


@app.callback()
def _bench() -> None:
    """Measure this machine: ratios of two things run in one go. Timings belong here, never in tests."""


def _announce(line: str) -> None:
    typer.echo(line, err=True)


@prints
def train_command(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    method: Annotated[str, typer.Option(help="The method.")] = "fedcg",
    split: Annotated[str, typer.Option(help="Extractor and classifier.")] = "lenet5",
    generator: Annotated[str, typer.Option(help="Generator.")] = "mlp",
    discriminator: Annotated[str, typer.Option(help="Discriminator.")] = "mlp",
    images: Annotated[int, typer.Option(min=8, help="Random images of the round.")] = 1000,
    image_size: Annotated[int, typer.Option(min=4, max=1024, help="Pixels of a side.")] = 32,
    batch: Annotated[int, typer.Option(min=2, help="Rows of a step.")] = 16,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of the round.")] = 4,
    threads: Annotated[int, typer.Option(min=1, help="Threads.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Two batches, one epoch: does it run at all?")] = False,
) -> Result:
    """One line about this box: steps and images a second, memory and energy of one whole local round on random images.

    Example: fedcg bench train --quick
    """
    import torch

    from experiments.bench.box_round import BoxRound, line_of, measure

    if not (device == "cpu" or (device.startswith("cuda") and torch.cuda.is_available())):
        raise BadInputError(f"--device {device}: this torch has cpu{', cuda' * torch.cuda.is_available()}")
    network = NetworkChoice(split=split, generator=generator, discriminator=discriminator)
    rows, rounds = (2 * batch, 1) if quick else (images, epochs)
    plan = BoxRound(device, method, network, image_size, rows, batch, rounds, threads)
    try:
        found = measure(plan, _announce)
    except ValueError as error:
        raise BadInputError(str(error)) from error
    setting = {**vars(plan), "network": network.model_dump(mode="json")}
    return {**bench_record("bench train"), "setting": setting, **found}, line_of(plan, found)


@prints
def coordinator_command(
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="MQTT sessions, one per device.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    network: Annotated[str, typer.Option(help="Split: how large updates are.")] = "lenet5_relu",
    out: Annotated[Path | None, typer.Option(help="A folder for coordinator.json.")] = None,
    sum_devices: Annotated[
        list[int] | None, typer.Option(min=4, max=1000, help="Instead: sealed sums of so many devices; again for more.")
    ] = None,
    lost: Annotated[
        float, typer.Option(min=0.0, max=0.4, help="With --sum-devices: share that vanishes after it sent keys.")
    ] = 0.1,
    numbers: Annotated[
        int,
        typer.Option(min=34, max=10_000_000, help="With --sum-devices: numbers of a device, with share and 32 tags."),
    ] = 2905,
) -> Result:
    """Lost updates, MB/s of updates, seconds from the last one to the next offer, and memory of a coordinator and a Mosquitto of its own.

    The sessions send a recorded update of the method fedcg, so no device trains; the aggregation worker merges all of them.
    With --sum-devices: bytes and processor time of sealed sums, each compared with the plain sum.

    Example: fedcg bench coordinator --sessions 50
    """
    if sum_devices:
        return _sums(sum_devices, lost, numbers)
    from coordinator.storage.store import Store
    from experiments.bench.coordinator_rounds import Setting, growth_mb, rounds_of, run_rounds
    from experiments.bench.sessions import new_home

    setting = Setting(sessions, rounds, network)
    record: dict[str, Any] = {
        **bench_record("bench coordinator"),
        "command": "fedcg bench coordinator "
        + " ".join(f"--{name} {value}" for name, value in asdict(setting).items()),
        "load": [round(value, 1) for value in os.getloadavg()],
        "setting": asdict(setting),
    }
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        home = new_home(Path(folder))
        run = asyncio.run(run_rounds(home, setting, _announce))
        with closing(Store.of(home)) as store:
            found = rounds_of(store, run)
    record |= {
        "updates": run.updates(),
        "growth_mb_per_round": growth_mb(found),
        "rounds": [asdict(each) for each in found],
    }
    if out is not None:
        write_record(record, out / "coordinator.json")
    return record, "\n".join(_coordinator_lines(record))


def _sums(devices: list[int], lost: float, numbers: int) -> Result:
    from experiments.bench.sealed_sums import measure_sum

    found = [measure_sum(count, lost, numbers) for count in devices]
    lines = [
        f"{one.devices:>4} devices, groups: {one.groups}, lost: {one.lost}; {one.numbers_bytes:,} bytes of numbers, {one.control_up:,} more up, "
        f"{one.control_down:,} down; {one.device_ms:.1f} ms a device and {one.opening_ms:.1f} to open it, {one.coordinator_ms:.1f} ms the coordinator"
        for one in found
    ]
    return {**bench_record("bench coordinator"), "sums": [asdict(one) for one in found]}, "\n".join(lines)


def _coordinator_lines(record: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{count} updates {name}" for name, count in record["updates"].items())
    for each in record["rounds"]:
        offer = (
            "" if each["next_offer_s"] is None else f", next offer {each['next_offer_s']:.2f} s after the last update"
        )
        memory = " + ".join(f"{value:.0f}" for value in each["memory_mb"])
        yield (
            f"round {each['round']}: {each['seconds']:.2f} s{offer}; {each['update_mb_per_s']:.1f} MB/s of updates until they are durable; "
            f"{memory} MB (coordinator + worker)"
        )
    if record["growth_mb_per_round"] is not None:
        yield f"memory grows by {record['growth_mb_per_round']:.2f} MB a round"


def privacy_command(
    grid: Annotated[
        str,
        typer.Argument(
            help="methods, pretrained, helped, fedcg-table2, ppidsg, epochs, mechanisms, antigan, antigan-four, antigan-four-curves or antigan-split"
        ),
    ],
    data: Annotated[str, typer.Option(help="as for `fedcg simulate --data`")] = "digits",
    out: Annotated[
        Path, typer.Option(help="folder for one JSON per run; runs that are there are not done again")
    ] = Path("privacy-out"),
    seed: Annotated[list[int] | None, typer.Option(min=0, help="a seed; again for more  [default: 0, 1, 2]")] = None,
    row: Annotated[list[str] | None, typer.Option(help="only this row; again for more")] = None,
    clients: Annotated[int, typer.Option(min=2, help="clients")] = 4,
    images: Annotated[int, typer.Option(min=10, help="training images of a client, at most")] = 500,
    epochs: Annotated[int, typer.Option(min=1, help="local epochs a round")] = 5,
    effort: Annotated[str, typer.Option(help="of the audits: quick, default or thorough")] = "quick",
    processes: Annotated[int, typer.Option(min=1, help="attacks, and simulated clients, at once")] = 2,
    show: Annotated[bool, typer.Option("--show", help="run nothing; print the tables of what is there")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print the records")] = False,
) -> None:
    """Simulate the federations of a grid, audit one client's last update of each, and print the tables of docs/privacy.md.

    The same command goes on where an interrupted one stopped. The records have every setting of every attack.

    Example: fedcg bench privacy methods --show
    """
    from experiments.bench.privacy_grids import Sizes, chosen_grid, run_grid, summary

    chosen, sizes = chosen_grid(grid, row or ()), Sizes(data, clients, images, epochs, effort, processes)
    records, failed = run_grid(grid, chosen, sizes, seed or (0, 1, 2), out, only_show=show)
    if as_json:
        print_data(records)
        raise typer.Exit(1 if failed else 0)
    for line in (f"**{chosen.title}**", "", *summary(records)):
        typer.echo(line)
    if failed:
        typer.echo(f"{failed} runs failed; the same command tries them again", err=True)
        raise typer.Exit(1)
