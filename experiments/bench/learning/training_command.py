"""`fedcg bench round`: a round against the plain reference. `fedcg bench train`: a round on this box. No torch before they run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from experiments.record import bench_record
from fedcg.errors import BadInputError
from fedcg.learning.errors import LearningError
from fedcg.learning.spec import NetworkChoice
from fedcg.terminal import Result, prints


@prints
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
) -> Result:
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
    extrapolated = {
        "epochs": [plan.measured_epochs, plan.epochs],
        "server_iterations": [plan.measured_iterations, plan.server_iterations],
    }
    record = {"setting": asdict(plan), "extrapolated": extrapolated if plan.is_extrapolated else None, **result}
    lines = [*_lines(result)]
    if plan.is_extrapolated:
        lines.append(f"extrapolated from {plan.measured_epochs} epochs and {plan.measured_iterations} student steps")
    return {**bench_record("bench round"), **record}, "\n".join(lines)


def _lines(result: Mapping[str, object]) -> Iterator[str]:
    yield f"{'reference':<12} {_seconds(result['reference_seconds'])}"
    for name, found in result.items():
        if isinstance(found, dict) and "speedup" in found:
            ratios = ", ".join(f"{stage} {ratio:.2f}x" for stage, ratio in found["speedup"].items())
            yield f"{name:<12} {_seconds(found['seconds'])}"
            yield f"{'':<12} {ratios}   ({found['what']})"


def _seconds(stages: object) -> str:
    assert isinstance(stages, dict)
    return ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())


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

    Raises:
        BadInputError: there is no such device or method, or the networks refuse the setting.
    """
    import torch

    from experiments.bench.learning.box_round import BoxRound, line_of, measure

    if not (device == "cpu" or (device.startswith("cuda") and torch.cuda.is_available())):
        raise BadInputError(f"--device {device}: this torch has cpu{', cuda' * torch.cuda.is_available()}")
    network = NetworkChoice(split=split, generator=generator, discriminator=discriminator)
    rows, rounds = (2 * batch, 1) if quick else (images, epochs)
    plan = BoxRound(device, method, network, image_size, rows, batch, rounds, threads)
    try:
        found = measure(plan, lambda line: typer.echo(line, err=True))
    except (LearningError, ValueError) as error:
        raise BadInputError(str(error)) from error
    setting = {**vars(plan), "network": network.model_dump(mode="json")}
    return {**bench_record("bench train"), "setting": setting, **found}, line_of(plan, found)
