"""`fedcg bench` and its commands: options, output, and the record.

Measurements are imported when their command runs, so that help does not load torch.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from experiments.errors import OptionError
from experiments.record import bench_record, write_record
from fedcg.terminal import Result, prints

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure performance on this machine.")


privacy_app = typer.Typer(no_args_is_help=True, help="Measure what an audit finds, and its false alarms.")
app.add_typer(privacy_app, name="privacy")
Out = Annotated[Path, typer.Option(help="folder for recordings and the record; a run resumes there")]
EffortName = Annotated[Literal["quick", "default", "thorough"], typer.Option("--effort", help="of the audits")]
Federations = Annotated[int, typer.Option(min=1, help="simulated federations; their updates take turns")]
Write = Annotated[bool, typer.Option("--write", help="also write the rates to the audit's detection.toml")]


@privacy_app.command()
@prints
def plants(
    out: Out,
    effort: EffortName = "quick",
    images: Annotated[
        list[int] | None,
        typer.Option(help="training images of a client, at most; repeat for more  [default: 100, 300]"),
    ] = None,
    plant: Annotated[list[str] | None, typer.Option(help="a kind of plant; repeat for more  [default: all]")] = None,
    count: Annotated[int, typer.Option(min=1, help="plants of each strength")] = 20,
    federations: Federations = 5,
    write: Write = False,
) -> Result:
    """Plant leaks of several strengths into recorded updates, and count how many the audit or `compare` finds.

    Example: fedcg bench privacy plants --out plants --images 100 --plant "scaled rows" --count 3
    """
    from audit.attacks.attack import Effort
    from experiments.bench import privacy_audits as bench
    from experiments.bench.planted_leaks import PLANTS

    if unknown := set(plant or ()) - set(PLANTS):
        raise OptionError(f"no plant {', '.join(sorted(unknown))}; choose from {', '.join(PLANTS)}")
    updates = {size: bench.recordings(out, federations, size) for size in images or (100, 300)}
    jobs = bench.plant_jobs(updates, plant or list(PLANTS), count, Effort(effort))
    record = bench.carried_out("plants", out, Effort(effort), jobs, partial(typer.echo, err=True))
    record["smallest"] = list(bench.smallest(record["rates"], Effort(effort)))
    if write:
        bench.write_detection("smallest", record["smallest"], Effort(effort))
    return record, "\n".join(bench.lines(record["rates"]))


@privacy_app.command()
@prints
def null(
    out: Out,
    effort: EffortName = "quick",
    audits: Annotated[int, typer.Option(min=1, help="audits")] = 50,
    federations: Federations = 5,
    write: Write = False,
) -> Result:
    """Audit updates against images that no client trained on, and count the false alarms; 2 red reports of 50 are within 1 %.

    Example: fedcg bench privacy null --out null --audits 4
    """
    from audit.attacks.attack import Effort
    from experiments.bench import privacy_audits as bench

    jobs = bench.null_jobs(bench.recordings(out, federations), audits, Effort(effort))
    record = bench.carried_out("null", out, Effort(effort), jobs, partial(typer.echo, err=True))
    if write:
        bench.write_detection("false_alarm", bench.false_alarms(record["rates"][0], Effort(effort)), Effort(effort))
    return record, "\n".join(bench.lines(record["rates"]))


@app.command("coordinator")
@prints
def coordinator_command(
    sessions: Annotated[int, typer.Option(min=1, max=1000, help="MQTT sessions, one per device.")] = 200,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 5,
    network: Annotated[str, typer.Option(help="Split, which determines the size of updates.")] = "lenet5_relu",
    out: Annotated[Path | None, typer.Option(help="Folder for coordinator.json.")] = None,
) -> Result:
    """Measure lost updates, MB/s of updates, seconds to the next offer, and memory of a coordinator with its own Mosquitto.

    The sessions send a recorded update of the method fedcg, so no device trains. The aggregation worker merges all
    updates.

    Example: fedcg bench coordinator --sessions 50
    """
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
        run = asyncio.run(run_rounds(home, setting, partial(typer.echo, err=True)))
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


def _coordinator_lines(record: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{count} updates {name}" for name, count in record["updates"].items())
    for each in record["rounds"]:
        offer = (
            "" if each["next_offer_s"] is None else f", next offer {each['next_offer_s']:.2f} s after the last update"
        )
        memory = " + ".join(f"{value:.0f}" for value in each["memory_mb"])
        yield (
            f"round {each['round']}: {each['seconds']:.2f} s{offer}; {each['update_mb_per_s']:.1f} MB/s of updates until stored durably;  "
            f"{memory} MB (coordinator + worker)"
        )
    if record["growth_mb_per_round"] is not None:
        yield f"memory grows by {record['growth_mb_per_round']:.2f} MB per round"
