"""`fedcg demo`."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel, Field
from rich.console import Console

from experiments import settings
from experiments.errors import OptionError
from fedcg.child_python import loading
from fedcg.find_mosquitto import NO_MOSQUITTO, find_mosquitto
from fedcg.learning.spec import image_form, plan_from_mapping
from fedcg.learning.split_names import is_projected
from fedcg.terminal import print_data

if TYPE_CHECKING:
    from experiments.demo.run_folder import Run


class DemoOptions(BaseModel):
    """The options of a demo in addition to its settings."""

    public_images: Annotated[
        int | None, Field(ge=0, description="unlabelled images, held out for the server; default: as feddf needs")
    ] = None
    params: Annotated[list[str], Field(description="parameter of the method, key=value; repeat for more")] = []
    out: Annotated[Path | None, Field(description="run's folder; default: ./demo-out, or the next free name")] = None
    as_json: Annotated[bool, Field(description="print summary.json instead of a table")] = False


@settings.options_of(settings.Setting, DemoOptions)
def demo_command(values: settings.Values, typed: frozenset[str]) -> None:
    """Run a whole federation on this machine: broker, coordinator and one agent per client, each in a separate process.

    By default, scikit-learn's handwritten digits are split between four clients with skewed classes. The result:
    accuracies compared with local-only training, the recorded traffic of the broker, and an ONNX model per client.

    Example: fedcg demo --clients 3 --rounds 5
    """
    with settings.bad_input_ends():
        options = DemoOptions.model_validate({name: values[name] for name in DemoOptions.model_fields})
        run = _run_folder(values, options)
        if find_mosquitto() is None:
            raise OptionError(NO_MOSQUITTO)
    console = Console(stderr=options.as_json)
    console.print(
        f"starting a broker, a coordinator and {run.setting.clients} agents; all files go to {run.root}", soft_wrap=True
    )
    from coordinator.errors import PlanError
    from coordinator.operations.create_federation import Completion

    completion = Completion()  # seconds of imports in another process, parallel to those of this one
    run.root.mkdir(parents=True, exist_ok=True)
    with loading():
        from experiments.demo.demo import Demo  # half a second of imports, behind the first line

    try:
        summary = asyncio.run(Demo(run, console, completion).run())
    except PlanError:
        shutil.rmtree(run.root)
        raise
    except (KeyboardInterrupt, asyncio.CancelledError):
        console.print(
            f"All processes are stopped. Their files are in {run.root}; start again with another --out", soft_wrap=True
        )
        raise typer.Exit(130) from None
    if options.as_json:
        print_data(summary)
    else:
        _show(summary, run.root, console)


def _run_folder(values: settings.Values, options: DemoOptions) -> Run:
    """Return the folder of the run; checks the options before anything starts."""
    from experiments.demo.run_folder import new_run

    public = options.public_images
    beside = {
        "data": settings.data_text(values["data"]),
        "public_images": settings.DEMO_PUBLIC_IMAGES.get(values["method"], 0) if public is None else public,
        "params": settings.parse_params(options.params),
    }
    fields = settings.Setting.model_fields
    chosen = {name: value for name, value in values.items() if name in fields}
    if values["network"] == fields["network"].default:
        chosen |= settings.DEMO_NETWORKS.get(values["method"], {})
    setting = settings.Setting.model_validate({**chosen, **beside})
    settings.check(setting)
    source = setting.source()
    image_form(source.input_form(setting.image_size), "a demo")
    plan = setting.plan(source)  # finds data, and a backbone's weights
    if is_projected(setting.network):
        from fedcg.learning.networks.plans import complete_spec

        complete_spec(plan_from_mapping(plan))  # reads them
    if setting.method in settings.DEMO_PUBLIC_IMAGES and not setting.public_images:
        raise OptionError(f"{setting.method} distils on unlabelled public images: omit --public-images or set a number")
    return new_run(options.out or settings.free_folder("demo-out"), setting)


def _show(summary: dict[str, Any], root: Path, console: Console) -> None:
    from experiments.demo.report import TABLE_WIDTH, table

    wide = Console(width=max(TABLE_WIDTH, console.width)) if not console.is_terminal else console
    wide.print(table(summary))

    def line(text: str) -> None:
        wide.print(text, markup=False, highlight=False, soft_wrap=True)

    line(f"{summary['seconds']['total']:.1f} s in total")
    line(f"broker: {summary['broker']}; the observer decoded {summary['observer']['artifacts']} artifacts")
    if sealed := summary["observer"]["sealed"]:
        line(f"sealed: {sealed['text']}")
    line(f"all numbers: {root / 'summary.json'}")
    models = [client["onnx_model"] for client in summary["clients"] if client["onnx_model"]]
    for model in models:
        line(f"ONNX model:  {model}")
    example = next((root / "data" / "common").glob("*/*.*"), None)
    if models and example is not None:
        line("classify an image with one of these models:")
        line(f"  fedcg infer --model {Path(models[0]).parent} {example}")
    client = summary["clients"][0]["id"]
    store = root / "devices" / client / "store"
    line("audit the update of one client (takes a minute, writes report.html):")
    line(
        f"  fedcg audit run --updates {root / 'observer'} --client {client} --data {root / 'data' / client} --private {store} "
        f"--auxiliary {root / 'data' / 'common'} --effort quick --out {root / 'audit'}"
    )
    line("compare the broker's recorded traffic with the private weights of one client:")
    states = sorted((store / "generations").glob("*/state.safetensors"))
    private = " ".join(f"--private {state}" for state in states)
    line(f"  fedcg audit compare --observed {root / 'observer'} {private}")
