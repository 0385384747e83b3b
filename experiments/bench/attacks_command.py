"""`fedcg bench attacks`: what one hostile client costs the others, with and without the coordinator's defence.

Imports torch only when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from experiments.record import bench_record, write_record
from fedcg.terminal import Result, prints

HONEST, ABSENT = "all honest", "absent"


@prints
def attacks_command(
    data: Annotated[str, typer.Option(help="As for `fedcg simulate --data`.")] = "digits",
    partition: Annotated[str, typer.Option(help="iid or dirichlet:OMEGA.")] = "iid",
    method: Annotated[str, typer.Option(help="A method.")] = "fedcg",
    clients: Annotated[int, typer.Option(min=3, help="Clients; the last one is hostile.")] = 5,
    min_clients: Annotated[int, typer.Option(min=1, help="Updates that a round with the defence needs.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 4,
    epochs: Annotated[int, typer.Option(min=1, help="Local epochs a round.")] = 4,
    images: Annotated[int, typer.Option(min=10, help="Training images of a client, at most.")] = 200,
    seed: Annotated[list[int] | None, typer.Option(min=0, help="A seed; again for more.  [default: 0, 1, 2]")] = None,
    attack: Annotated[list[str] | None, typer.Option(help="An attack; again for more.  [default: all]")] = None,
    defence: Annotated[
        bool | None, typer.Option(help="Run the attacks with the defence alone, or without it alone.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value: a parameter of the method.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
    out: Annotated[
        Path | None, typer.Option(help="A folder for one JSON file per seed; what is there is kept.")
    ] = None,
) -> Result:
    """Accuracy of the honest clients' downloaded models, and of those they deploy, when the last client is hostile.

    Beside each attack stand the same federation with all clients honest, and without the last client.

    Example: fedcg bench attacks --rounds 5 --attack sign-flipped
    """
    import torch

    from experiments.settings import parse_params

    torch.set_num_threads(threads)
    setting: dict[str, Any] = {
        "data": data,
        "partition": partition,
        "method": method,
        "clients": clients,
        "rounds": rounds,
        "local_epochs": epochs,
        "images_per_client": images,
        "params": dict(parse_params(set_ or ())),
    }
    records = []
    for number in seed or (0, 1, 2):
        path = (
            None if out is None else out / f"{Path(data).name}-{partition.replace(':', '')}-{method}-seed{number}.json"
        )
        record = {
            **bench_record("bench attacks"),
            "setting": setting | {"data": Path(data).name, "seed": number, "min_clients": min_clients},
            "cases": [],
        }
        if path is not None and path.is_file():
            record = json.loads(path.read_text(encoding="utf-8"))
        _run_cases(record, setting | {"seed": number}, min_clients, attack, defence, path)
        records.append(record)
    return records, "\n".join(table(records))


def _run_cases(
    record: dict[str, Any],
    setting: Mapping[str, Any],
    quorum: int,
    chosen: list[str] | None,
    only: bool | None,
    path: Path | None,
) -> None:
    """Run what the record lacks, and write it after every case."""
    from coordinator.config import RobustnessSettings
    from experiments.bench.attacked_run import ATTACKS, attacked_run
    from experiments.simulation.batch import RunSetting
    from experiments.simulation.party_builder import simulated_party
    from fedcg.learning.registry import get_method
    from fedcg.learning.simulation.tasks import SerialRunner

    unknown = sorted(set(chosen or ()) - ATTACKS.keys())
    if unknown:
        raise typer.BadParameter(
            f"no attack {', '.join(unknown)}; there are {', '.join(ATTACKS)}", param_hint="--attack"
        )
    seals = bool(get_method(setting["method"]).payload.sealed)
    if not seals and any(name.startswith("sealed-") for name in chosen or ()):
        raise typer.BadParameter(f"{setting['method']} seals nothing: attacks on sealed parts need a method that does")
    chosen = chosen or [name for name in ATTACKS if seals or not name.startswith("sealed-")]
    wanted = [(HONEST, False), (HONEST, True), (ABSENT, False)]
    wanted += [(name, defended) for name in chosen for defended in (True, False)]
    wanted = [case for case in wanted if only is None or case[1] is only or case[0] == ABSENT]
    done = {(case["attack"], case["defended"]) for case in record["cases"]}
    runner, training, party = SerialRunner(), RunSetting(**setting, quick=True), None
    for name, defended in wanted:
        if (name, defended) in done:
            continue
        party = party or simulated_party(training, training.source())
        settings = RobustnessSettings() if defended else None
        run = attacked_run(party, runner, ATTACKS.get(name), settings, quorum=quorum, is_absent=name == ABSENT)
        typer.echo(
            f"seed {setting['seed']}, {name}, {'with' if defended else 'without'} the defence: {run.accuracy:.1f}, deployed {run.deployed:.1f}",
            err=True,
        )
        record["cases"].append({"attack": name, "defended": defended, **asdict(run)})
        if path is not None:
            write_record(record, path)


def table(records: list[dict[str, Any]]) -> Iterator[str]:
    """The records as lines of Markdown: per attack, the mean over seeds and each seed's accuracy in percent."""
    yield "| the last client | without the defence | deployed | with it | deployed | merged with it |"
    yield "|---|---|---|---|---|---|"
    names = dict.fromkeys(case["attack"] for record in records for case in record["cases"])
    for name in names:
        figures = [(defended, figure) for defended in (False, True) for figure in ("accuracy", "deployed")]
        cells = [_cell(records, name, figure, defended=defended) for defended, figure in figures]
        yield f"| {name} | {' | '.join(cells)} | {_merged(records, name)} |"


def _cases(records: list[dict[str, Any]], name: str, *, defended: bool) -> list[dict[str, Any]]:
    return [
        case for record in records for case in record["cases"] if (case["attack"], case["defended"]) == (name, defended)
    ]


def _cell(records: list[dict[str, Any]], name: str, figure: str, *, defended: bool) -> str:
    found = [case[figure] for case in _cases(records, name, defended=defended) if figure in case]
    return f"{fmean(found):.1f} ({' / '.join(f'{each:.1f}' for each in found)})" if found else ""


def _merged(records: list[dict[str, Any]], name: str) -> str:
    """In how many rounds the hostile client's update was merged, and how often an honest one was not."""
    runs = [case["screened"] for case in _cases(records, name, defended=True)]
    if not runs:
        return ""
    last = max(entry["client"] for entry in runs[0])
    own = [entry for run in runs for entry in run if entry["client"] == last]
    others = [entry for run in runs for entry in run if entry["client"] != last]
    return (
        f"{sum(entry['weight'] > 0 for entry in own)} of {len(own)}; "
        f"honest {sum(entry['weight'] > 0 for entry in others)} of {len(others)}"
    )
