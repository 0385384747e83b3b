"""`fedcg bench round` and `fedcg bench train`: a round and its steps against the plain reference. No torch before they run."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from experiments.record import bench_record
from fedcg.errors import BadInputError
from fedcg.json_output import print_data
from fedcg.learning.errors import LearningError
from fedcg.learning.spec import NetworkChoice

if TYPE_CHECKING:
    from experiments.bench.learning.steps import Steps


def round_command(
    clients: Annotated[int, typer.Option(min=1, help="Clients.")] = 4,
    images: Annotated[int, typer.Option(min=32, help="Images of 3x32x32 per client.")] = 2000,
    batch: Annotated[int, typer.Option(min=2, help="Rows of a step.")] = 16,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of classification, and of the GAN, in a round.")] = 20,
    server_iterations: Annotated[int, typer.Option(min=1, help="Steps of the student in a round.")] = 2000,
    processes: Annotated[int, typer.Option(min=1, help="Clients that ours trains at once, a thread each.")] = 2,
    threads: Annotated[int, typer.Option(min=1, help="Threads of the reference, and of our server.")] = 2,
    measured_epochs: Annotated[int, typer.Option(min=1, help="Epochs that are run; the rest is extrapolated.")] = 1,
    measured_iterations: Annotated[int, typer.Option(min=1, help="Steps of the student that are run.")] = 200,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the median counts.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="A fiftieth of an epoch, once: does it run at all?")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """A whole FedCG round: the published algorithm one step at a time, and ours; ratios of one run.

    Example: fedcg bench round --quick
    """
    from dataclasses import asdict

    from experiments.bench.learning.round import RoundPlan, measure

    plan = RoundPlan(
        clients=clients,
        images=64 if quick else images,
        batch=batch,
        epochs=epochs,
        server_iterations=server_iterations,
        processes=processes,
        threads=threads,
        measured_epochs=min(measured_epochs, epochs),
        measured_iterations=min(5 if quick else measured_iterations, server_iterations),
        repeats=1 if quick else repeats,
    )
    result = measure(plan, lambda line: typer.echo(line, err=True))
    if as_json:
        extrapolated = {
            "epochs": [plan.measured_epochs, plan.epochs],
            "server_iterations": [plan.measured_iterations, plan.server_iterations],
        }
        record = {"setting": asdict(plan), "extrapolated": extrapolated if plan.is_extrapolated else None, **result}
        print_data({**bench_record("bench round"), **record})
        return
    _print_round(result)
    if plan.is_extrapolated:
        typer.echo(f"extrapolated from {plan.measured_epochs} epochs and {plan.measured_iterations} student steps")


def _print_round(result: Mapping[str, object]) -> None:
    typer.echo(f"{'reference':<12} {_seconds(result['reference_seconds'])}")
    for name, found in result.items():
        if isinstance(found, dict) and "speedup" in found:
            typer.echo(f"{name:<12} {_seconds(found['seconds'])}")
            ratios = ", ".join(f"{stage} {ratio:.2f}x" for stage, ratio in found["speedup"].items())
            typer.echo(f"{'':<12} {ratios}   ({found['what']})")


def _seconds(stages: object) -> str:
    assert isinstance(stages, dict)
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())


def train_command(
    batch: Annotated[list[int] | None, typer.Option(min=2, help="Rows of a step; again for more.  [16, 64]")] = None,
    networks: Annotated[
        list[str] | None, typer.Option(help="generator/discriminator; again for more.  [conv/conv_published, mlp/mlp]")
    ] = None,
    split: Annotated[str, typer.Option(help="Extractor and classifier.")] = "lenet5",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each measurement.")] = 100,
    threads: Annotated[int, typer.Option(min=1, help="Threads, of both sides.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each measurement; the median counts.")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="Five steps, once: does it run at all?")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="cpu or cuda: one line about this box instead, of a whole local round; no reference."),
    ] = None,
    method: Annotated[str, typer.Option(help="With --device: the method.")] = "fedcg",
    images: Annotated[int, typer.Option(min=8, help="With --device: random images of the round.")] = 1000,
    image_size: Annotated[int, typer.Option(min=4, max=1024, help="With --device: pixels of a side.")] = 32,
    epochs: Annotated[int, typer.Option(min=1, help="With --device: epochs of the round.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Milliseconds of one step of each stage: the same networks by the plain reference and by ours, one process each.

    Example: fedcg bench train --quick
    """
    if device is not None:
        pair = (networks or ["mlp/mlp"])[0].partition("/")
        rows = min(batch or [16])
        _box(
            NetworkChoice(split=split, generator=pair[0], discriminator=pair[2] or pair[0]),
            *(device, method, image_size, 2 * rows if quick else images, rows, 1 if quick else epochs, threads),
            as_json=as_json,
        )
        return
    from experiments.bench.learning.steps import Steps, measure

    chosen = [tuple(pair.split("/", 1)) for pair in networks or ["conv/conv_published", "mlp/mlp"]]
    if any(len(pair) != 2 for pair in chosen):
        raise typer.BadParameter("write --networks generator/discriminator, e.g. conv/conv_published")
    plan = Steps(
        pairs=tuple((pair[0], pair[1]) for pair in chosen),
        batches=tuple(batch or [16, 64]),
        split=split,
        steps=5 if quick else steps,
        threads=threads,
        repeats=1 if quick else repeats,
    )

    def announce(line: str) -> None:
        typer.echo(line, err=True)

    cases, on_gpu = measure(plan, announce), _on_gpu(plan, announce)
    if as_json:
        setting = {"split": split, "steps": plan.steps, "threads": threads, "repeats": plan.repeats}
        print_data({**bench_record("bench train"), "setting": setting, "cases": cases, **on_gpu})
        return
    for case in cases:
        typer.echo(
            f"{case['generator']}/{case['discriminator']} batch {case['batch']} {case['stage']:<9} "
            f"reference {case['reference_ms']:7.2f} ms, ours {case['ours_ms']:7.2f} ms: {case['speedup']:.2f}x"
        )
    if on_gpu:
        typer.echo(json.dumps(on_gpu, indent=1))


def _box(
    network: NetworkChoice,
    device: str,
    method: str,
    size: int,
    images: int,
    batch: int,
    epochs: int,
    threads: int,
    *,
    as_json: bool,
) -> None:
    """Time this box's local round.

    Raises:
        BadInputError: there is no such device or method, or the networks refuse the setting.
    """
    import torch

    from experiments.bench.learning.box_round import BoxRound, line_of, measure

    if not (device == "cpu" or (device.startswith("cuda") and torch.cuda.is_available())):
        raise BadInputError(f"--device {device}: this torch has cpu{', cuda' * torch.cuda.is_available()}")
    plan = BoxRound(device, method, network, size, images, batch, epochs, threads)
    try:
        found = measure(plan, lambda line: typer.echo(line, err=True))
    except (LearningError, ValueError) as error:
        raise BadInputError(str(error)) from error
    if as_json:
        setting = {**vars(plan), "network": network.model_dump(mode="json")}
        print_data({**bench_record("bench train --device"), "setting": setting, **found})
        return
    typer.echo(line_of(plan, found))


def _on_gpu(plan: Steps, announce: Callable[[str], None]) -> dict[str, object]:
    """The same stages of ours on a CUDA device; no key at all without one."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from experiments.bench.learning import gpu

    return {"cuda_device": torch.cuda.get_device_name(), "cuda": gpu.measure(plan, announce)}
