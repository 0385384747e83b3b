"""`fedcg demo` and `fedcg simulate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console

from experiments.errors import ExperimentError, OptionError
from experiments.options import Setting, parse_params
from fedcg.learning.registry import method_names

if TYPE_CHECKING:
    from experiments.run import Run

Data = Annotated[str, typer.Option(help="`digits`, or a folder: CLASS/*.png|jpg, or train/ and test/ of such")]
Clients = Annotated[int, typer.Option(help="number of clients")]
PartitionText = Annotated[str, typer.Option("--partition", help="iid or dirichlet:OMEGA")]
ImagesPerClient = Annotated[int | None, typer.Option(help="at most so many training images per client")]
Rounds = Annotated[int, typer.Option(help="rounds of the federation")]
LocalEpochs = Annotated[int, typer.Option(help="local epochs per round")]
MethodName = Annotated[str, typer.Option(help="fedcg, fedmd_cg, local, ...: see `fedcg method list`")]
Network = Annotated[str, typer.Option(help="lenet5 or lenet5_relu")]
Generator = Annotated[str, typer.Option(help="conv or mlp")]
ImageSize = Annotated[int, typer.Option(help="images become SIZE x SIZE pixels")]
Flip = Annotated[
    bool, typer.Option("--flip/--no-flip", help="augment by horizontal flips: for photographs, not for digits")
]
Seed = Annotated[int, typer.Option(help="root of all randomness: split, weights, order, noise")]
Quick = Annotated[
    bool,
    typer.Option("--quick/--no-quick", help="larger steps and a shorter server loop than the method's own defaults"),
]
Params = Annotated[
    list[str] | None, typer.Option("--set", help="a parameter of the method, key=value; repeat for more")
]


def _bad_input(why: str) -> typer.Exit:
    """Exit code 2, with the reason on one line: a path in a box would be broken in the middle."""
    Console(stderr=True, highlight=False).print(f"Error: {why}", markup=False, soft_wrap=True)
    return typer.Exit(2)


def _setting(values: dict[str, Any], params: list[str] | None) -> Setting:
    try:
        return Setting.model_validate({**values, "params": parse_params(params or [])})
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors(include_url=False)]
        raise _bad_input("; ".join(lines)) from error
    except OptionError as error:
        raise _bad_input(str(error)) from error


def _checked(setting: Setting) -> Setting:
    """Fail before anything is started when the data or the partition can't be used."""
    if setting.method not in method_names():
        raise _bad_input(f"no method {setting.method!r}; there are {', '.join(method_names())}")
    try:
        setting.checked_partition()
        setting.source()
    except ExperimentError as error:
        raise _bad_input(str(error)) from error
    return setting


def _usable(open_run: Callable[[], Run]) -> Run:
    try:
        return open_run()
    except OptionError as error:
        raise _bad_input(str(error)) from error


def _free_folder(stem: str) -> Path:
    names = [stem, *(f"{stem}-{number}" for number in range(2, 10_000))]
    return next(path for path in map(Path, names) if not path.exists())


def demo_command(
    data: Data = "digits",
    clients: Clients = 4,
    partition: PartitionText = "dirichlet:0.5",
    images_per_client: ImagesPerClient = None,
    rounds: Rounds = 5,
    local_epochs: LocalEpochs = 4,
    method: MethodName = "fedcg",
    network: Network = "lenet5_relu",
    generator: Generator = "mlp",
    image_size: ImageSize = 32,
    flip: Flip = False,
    seed: Seed = 0,
    quick: Quick = True,
    params: Params = None,
    broker: Annotated[str, typer.Option(help="auto, mosquitto, extracted or amqtt")] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="folder of the run; default: ./demo-out, or the next free name")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="go on with an interrupted run; its own options count")] = None,
    record: Annotated[
        Path | None, typer.Option(help="also write the run here as one JSON without paths of this machine")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print summary.json instead of a table")] = False,
) -> None:
    """Run a whole federation on this machine: broker, coordinator and one agent per client, each a process of its own.

    By default scikit-learn's handwritten digits are split over four clients with a skewed choice of classes. At the end:
    accuracies beside the local-only baseline, what crossed the broker, and an ONNX model per client.
    """
    from experiments.demo import Demo
    from experiments.record import write_record
    from experiments.run import new_run, resumed_run

    console = Console(stderr=as_json)
    if resume is not None:
        run = _usable(lambda: resumed_run(resume))
    else:
        values = {
            "data": data if data == "digits" else str(Path(data).resolve()),
            "clients": clients,
            "partition": partition,
            "images_per_client": images_per_client,
            "rounds": rounds,
            "local_epochs": local_epochs,
            "method": method,
            "network": network,
            "generator": generator,
            "image_size": image_size,
            "flip": flip,
            "seed": seed,
            "quick": quick,
        }
        setting = _checked(_setting(values, params))
        run = _usable(lambda: new_run(out or _free_folder("demo-out"), setting, broker))
    finished = run.root / "summary.json"
    try:
        summary = json.loads(finished.read_text()) if finished.exists() else asyncio.run(Demo(run, console).run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(
            f"Interrupted; every process is stopped. Go on with: fedcg demo --resume {run.root}", soft_wrap=True
        )
        raise typer.Exit(130) from None
    if record is not None:
        write_record(summary, run.root, record)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _tell(summary, run.root, console)


def _tell(summary: dict[str, Any], root: Path, console: Console) -> None:
    from experiments.summary import TABLE_WIDTH, table

    wide = Console(width=max(TABLE_WIDTH, console.width)) if not console.is_terminal else console
    wide.print(table(summary))
    times = summary["seconds"]
    parts = ", ".join(f"{name} {times[name]:.1f}" for name in ("startup", "train", "transport", "aggregate", "export"))

    def say(text: str) -> None:
        wide.print(text, markup=False, highlight=False, soft_wrap=True)

    say(f"{times['total']:.1f} s in total, of it on the critical path: {parts}")
    say(f"broker: {summary['broker']}; the observer decoded {summary['observer']['artifacts']} artifacts")
    say(f"accuracy over rounds: {root / 'accuracy.png'}")
    say(f"all numbers:          {root / 'summary.json'}")
    models = [client["onnx_model"] for client in summary["clients"] if client["onnx_model"]]
    for model in models:
        say(f"ONNX model:           {model}")
    example = next((root / "data" / "common").glob("*/*.*"), None)
    if models and example is not None:
        say("classify an image with one of them:")
        say(f"  fedcg infer --model {Path(models[0]).parent} {example}")
    say("compare everything that crossed the broker with the private weights of one client:")
    states = sorted(
        (root / "devices" / summary["clients"][0]["id"] / "store" / "generations").glob("*/state.safetensors")
    )
    private = " ".join(f"--private {state}" for state in states)
    say(f"  fedcg audit compare --observed {root / 'observer'} {private}")


def simulate_command(
    data: Data = "digits",
    clients: Clients = 4,
    partition: PartitionText = "dirichlet:0.5",
    images_per_client: ImagesPerClient = None,
    rounds: Rounds = 5,
    local_epochs: LocalEpochs = 4,
    method: MethodName = "fedcg",
    network: Network = "lenet5_relu",
    generator: Generator = "mlp",
    image_size: ImageSize = 32,
    flip: Flip = False,
    seed: Seed = 0,
    params: Params = None,
    quick: Quick = False,
    threads: Annotated[int, typer.Option(help="torch threads; other numbers give other last digits")] = 1,
    out: Annotated[Path | None, typer.Option(help="write the run's JSON here")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the run's JSON")] = False,
) -> None:
    """Run a federation inside one process, with the very functions the agents and the coordinator call, and no network."""
    values = {
        "data": data if data == "digits" else str(Path(data).resolve()),
        "clients": clients,
        "partition": partition,
        "images_per_client": images_per_client,
        "rounds": rounds,
        "local_epochs": local_epochs,
        "method": method,
        "network": network,
        "generator": generator,
        "image_size": image_size,
        "flip": flip,
        "seed": seed,
        "quick": quick,
    }
    setting = _checked(_setting(values, params))
    from experiments.simulate import run_simulation

    record = run_simulation(setting, threads=threads, console=Console(stderr=True))
    text = json.dumps(record, indent=1)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text + "\n")
    if as_json:
        typer.echo(text)
