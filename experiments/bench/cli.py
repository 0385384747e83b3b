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
from statistics import fmean
from typing import Annotated, Any, Literal

import typer

from experiments.record import bench_record, write_record
from experiments.settings import data_text, parse_seeds
from fedcg.errors import BadInputError
from fedcg.terminal import Result, command

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure performance on this machine.")
privacy = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure attacks and the audit.")
app.add_typer(privacy, name="privacy")


_AUDITS = """Measure what an audit and `compare` find, and false alarms.

`plants`: leaks of several strengths in recorded updates. `null`: images that no client trained on are called
"trained on"; at a level of 1 %, 2 red reports of 50 are within chance. Updates are those of federations like the demo.

Example: fedcg bench privacy """


@privacy.command("null", help=f"{_AUDITS}null --out null --count 3")
@command(privacy, "plants", help=f'{_AUDITS}plants --out plants --images 100 --plant "scaled rows" --count 3')
def audits_command(
    context: typer.Context,
    out: Annotated[Path, typer.Option(help="Folder for recordings and the record; a run resumes there.")],
    effort: Annotated[Literal["quick", "default", "thorough"], typer.Option(help="Of the audits.")] = "quick",
    images: Annotated[
        list[int] | None,
        typer.Option(help="Training images of a client, at most; again for more.  [default: 100, 300]"),
    ] = None,
    plant: Annotated[list[str] | None, typer.Option(help="A kind of plant; again for more.  [default: all]")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Plants of each strength, or null audits.  [default: 20, 50]")
    ] = None,
    federations: Annotated[int, typer.Option(min=1, help="Simulated; their clients' updates take turns.")] = 5,
    write: Annotated[bool, typer.Option("--write", help="Also write the rates to the audit's detection.toml.")] = False,
) -> Result:
    """Run the audits of a kind, and return their rates."""
    from experiments.bench import privacy_audits

    kind = str(context.info_name)
    count = count or (50 if kind == "null" else 20)
    setting = {"effort": effort, "images": images or [100, 300], "plant": plant or [], "count": count, "federations": federations}  # fmt: skip
    record = privacy_audits.run(kind, out, partial(typer.echo, err=True), setting, write=write)
    return record, "\n".join(privacy_audits.lines(record["rates"]))


@command(privacy, "published")
def published_command(
    name: Annotated[str, typer.Argument(help="labels, membership, keys, reconstruction or active_gan.")],
    row: Annotated[list[str] | None, typer.Option(help="Only this row; repeat for more.")] = None,
    data: Annotated[str, typer.Option(help="As for fedcg simulate.")] = "digits",
    seeds: Annotated[str, typer.Option(help="Seeds, e.g. 0,1,2 or 0-4.")] = "0-2",
    out: Annotated[Path, typer.Option(help="Folder of the records; finished ones are not repeated.")] = Path("bench"),
) -> Result:
    """Repeat an attack of PPIDSG or Anti-GAN as published, beside the arms that show what it measures.

    Example: fedcg bench privacy published membership --data FOLDER
    """
    from experiments.bench.published import EXPERIMENTS, recorded

    if name not in EXPERIMENTS:
        raise BadInputError(f"no published experiment {name!r}; there are {', '.join(EXPERIMENTS)}")
    found = recorded(name, row or (), data_text(data), parse_seeds(seeds), out)
    return found, "\n".join(f"{fmean(values):8.4f}  {title}" for title, values in found.items())


@command(app, "coordinator")
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
    record = bench_record("bench coordinator", asdict(setting), **asdict(setting))
    record["load"] = [round(value, 1) for value in os.getloadavg()]
    with tempfile.TemporaryDirectory(prefix="fedcg-bench-") as folder:
        home = new_home(Path(folder))
        run = asyncio.run(run_rounds(home, setting, partial(typer.echo, err=True)))
        with closing(Store.of(home)) as store:
            found = rounds_of(store, run)
    record |= {"updates": run.updates(), "growth_mb_per_round": growth_mb(found), "rounds": list(map(asdict, found))}
    if out is not None:
        write_record(record, out / "coordinator.json")
    return record, "\n".join(_coordinator_lines(record))


def _coordinator_lines(record: dict[str, Any]) -> Iterator[str]:
    yield ", ".join(f"{count} updates {name}" for name, count in record["updates"].items())
    for each in record["rounds"]:
        wait = each["next_offer_s"]
        offer = "" if wait is None else f", next offer {wait:.2f} s after the last update"
        memory = " + ".join(f"{value:.0f}" for value in each["memory_mb"])
        yield (
            f"round {each['round']}: {each['seconds']:.2f} s{offer}; {each['update_mb_per_s']:.1f} MB/s of updates until stored durably;  "
            f"{memory} MB (coordinator + worker)"
        )
    if record["growth_mb_per_round"] is not None:
        yield f"memory grows by {record['growth_mb_per_round']:.2f} MB per round"
