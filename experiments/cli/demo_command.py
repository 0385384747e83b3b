"""`fedcg demo`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from experiments.errors import OptionError
from experiments.settings.cli_options import (
    Clients,
    Crop,
    Data,
    Flip,
    Generator,
    ImageSize,
    ImagesPerClient,
    LocalEpochs,
    Network,
    PartitionText,
    Quick,
    Rounds,
    bad_input,
    check,
    data_text,
    free_folder,
    open_data,
    validated,
)
from experiments.settings.options import DEMO_PUBLIC_IMAGES, Setting, parse_params

if TYPE_CHECKING:
    from experiments.demo.run_folder import Run

MethodName = Annotated[str, typer.Option(help="fedcg, fedmd_cg, local, ...: see `fedcg method list`")]
Seed = Annotated[int, typer.Option(help="root of all randomness: split, weights, order, noise")]
Params = Annotated[
    list[str] | None, typer.Option("--set", help="a parameter of the method, key=value; repeat for more")
]


def _parsed(params: list[str] | None) -> dict[str, Any]:
    try:
        return dict(parse_params(params or []))
    except OptionError as error:
        raise bad_input(str(error)) from error


def _usable(open_run: Callable[[], Run]) -> Run:
    try:
        return open_run()
    except OptionError as error:
        raise bad_input(str(error)) from error


def demo_command(
    data: Data = "digits",
    clients: Clients = 4,
    partition: PartitionText = "dirichlet:0.5",
    images_per_client: ImagesPerClient = None,
    public_images: Annotated[
        int | None,
        typer.Option(min=0, help="images without labels, held out for the server; default: what feddf needs"),
    ] = None,
    rounds: Rounds = 5,
    local_epochs: LocalEpochs = 4,
    method: MethodName = "fedcg",
    network: Network = "lenet5_relu",
    generator: Generator = "mlp",
    image_size: ImageSize = 32,
    flip: Flip = False,
    crop: Crop = 0,
    seed: Seed = 0,
    quick: Quick = True,
    params: Params = None,
    broker: Annotated[str, typer.Option(help="mosquitto, amqtt, or auto: Mosquitto where there is one")] = "auto",
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
    from experiments.demo.run_folder import new_run, resumed_run

    console = Console(stderr=as_json)
    if resume is not None:
        run = _usable(lambda: resumed_run(resume))
    else:
        values = {
            "data": data_text(data),
            "clients": clients,
            "partition": partition,
            "images_per_client": images_per_client,
            "public_images": DEMO_PUBLIC_IMAGES.get(method, 0) if public_images is None else public_images,
            "rounds": rounds,
            "local_epochs": local_epochs,
            "method": method,
            "network": network,
            "generator": generator,
            "image_size": image_size,
            "flip": flip,
            "crop": crop,
            "seed": seed,
            "quick": quick,
            "params": _parsed(params),
        }
        setting = validated(Setting, values)
        check(setting)
        open_data(setting)
        if method in DEMO_PUBLIC_IMAGES and not setting.public_images:
            raise bad_input(
                f"{method} distils on unlabelled public images: leave --public-images out, or give a number"
            )
        run = _usable(lambda: new_run(out or free_folder("demo-out"), setting, broker))
    console.print(
        f"starting a broker, a coordinator and {run.setting.clients} agents; everything goes to {run.root}",
        soft_wrap=True,
    )
    from experiments.demo.demo import Demo  # half a second of imports, behind the first line
    from experiments.record import write_record

    finished = run.root / "summary.json"
    try:
        summary = json.loads(finished.read_text()) if finished.exists() else asyncio.run(Demo(run, console).run())
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(f"Every process is stopped. Go on with: fedcg demo --resume {run.root}", soft_wrap=True)
        raise typer.Exit(130) from None
    if record is not None:
        write_record(summary, run.root, record)
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        _tell(summary, run.root, console)


def _tell(summary: dict[str, Any], root: Path, console: Console) -> None:
    from experiments.demo.summary import TABLE_WIDTH, table

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
