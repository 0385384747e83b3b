"""`fedcg simulate`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from typer.core import TyperCommand

from experiments.data.deal import deal_out
from experiments.data.source import Source
from experiments.errors import ExperimentError
from experiments.papers.catalogue import find_presets
from experiments.papers.plan import table_batch
from experiments.parallel.ray_cluster import LOCAL, check_ray
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
    reasons,
)
from experiments.simulation.batch import (
    Batch,
    RunSetting,
    load_batch,
    parse_method_params,
    parse_seeds,
    plan_batch,
    save_batch,
)
from experiments.simulation.run_slots import Lanes, default_workers, open_lanes, open_ray_lanes
from fedcg.learning.errors import NetworkError
from fedcg.learning.registry import get_method
from fedcg.learning.spec import plan_from_mapping

# Options that are no field of a run's setting.
_BESIDE = frozenset(
    {
        "ctx",
        "method",
        "seed",
        "seeds",
        "params",
        "workers",
        "ray",
        "out",
        "resume",
        "force",
        "as_json",
        "tensorboard",
        "plot",
    }
)


def simulate_command(
    ctx: typer.Context,
    data: Data = "digits",
    clients: Clients = 4,
    partition: PartitionText = "dirichlet:0.5",
    images_per_client: ImagesPerClient = None,
    validation: Annotated[
        str, typer.Option(help="share: of the training images; test-half: half of a client's test images")
    ] = "share",
    test: Annotated[
        str, typer.Option(help="proportional: as a client's training images; even: dealt out evenly")
    ] = "proportional",
    public_images: Annotated[int, typer.Option(help="images without labels for the server (feddf)")] = 0,
    rounds: Rounds = 4,
    local_epochs: LocalEpochs = 4,
    local_steps: Annotated[int, typer.Option(help="local steps per round instead of epochs; 0: epochs")] = 0,
    batch_size: Annotated[int | None, typer.Option(help="local batch size; default: the method's")] = None,
    lr: Annotated[float | None, typer.Option(help="local learning rate; default: the method's")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="fedcg (default), fedmd_cg, local, ...: see `fedcg method list`; repeat for more"),
    ] = None,
    params: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help="a parameter, key=value of every method or METHOD.key=value of one; repeat for more"
        ),
    ] = None,
    paper: Annotated[
        str | None,
        typer.Option(help="a published table's runs, e.g. fedcg:table1:cifar10-4; options over it: see docs/papers.md"),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(help="roots of all randomness, e.g. 0,1,2 or 0-4: a run with each")
    ] = None,
    seed: Annotated[int, typer.Option(help="the same for one run")] = 0,
    network: Network = "lenet5_relu",
    generator: Generator = "mlp",
    discriminator: Annotated[str | None, typer.Option(help="default: the one that goes with the generator")] = None,
    noise_dim: Annotated[int | None, typer.Option(help="default: the one that goes with the generator")] = None,
    image_size: ImageSize = 32,
    normalise: Annotated[
        str, typer.Option(help="half: to [-1, 1]; imagenet: by ImageNet's mean and deviation")
    ] = "half",
    flip: Flip = False,
    crop: Crop = 0,
    quick: Quick = True,
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda, cuda:1")] = "cpu",
    precision: Annotated[
        str, typer.Option(help="of training steps: f32; bf16 on cuda, for convolutions and matrix products")
    ] = "f32",
    batched_clients: Annotated[
        bool | None,
        typer.Option(
            "--batched-clients/--no-batched-clients",
            help="train clients together in one process, where the method can; default: on cuda (slower on a CPU)",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="processes; default: one per CPU, at most one per client, 1 on cuda")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="on a Ray cluster, several runs at once: auto or HOST:PORT of a running one, else one of this machine alone",
        ),
    ] = None,
    threads: Annotated[int, typer.Option(help="torch threads of each; other numbers give other last digits")] = 1,
    evaluate_every: Annotated[int, typer.Option(help="measure after every so many rounds, and after the last")] = 1,
    participation: Annotated[float, typer.Option(help="share of the clients that take part in a round")] = 1.0,
    early_stop: Annotated[
        int | None, typer.Option(help="end after so many rounds without a better validation of any client")
    ] = None,
    shadow: Annotated[bool, typer.Option("--shadow/--no-shadow", help="train local-only shadows beside")] = True,
    codec: Annotated[
        str, typer.Option(help="of updates: f32, f16, i8, f16-delta or i8-delta; a deployment's default is i8-delta")
    ] = "f32",
    aggregate_codec: Annotated[
        str, typer.Option(help="of aggregates: f32 or f16; a deployment's default is f16")
    ] = "f32",
    variant: Annotated[str, typer.Option(help="a free label that tells an ablation's runs apart")] = "",
    out: Annotated[Path | None, typer.Option(help="folder; default: ./simulate-out, or the next free name")] = None,
    resume: Annotated[Path | None, typer.Option(help="go on in this folder; its own options count")] = None,
    force: Annotated[bool, typer.Option("--force", help="do finished runs of this call again")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard/--no-tensorboard", help="write event files")] = True,
    plot: Annotated[bool, typer.Option("--plot/--no-plot", help="draw curves.png")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print the runs' records instead of a table")] = False,
) -> None:
    """Run federations without a network, with the very functions that agents and coordinator call.

    Every method is run with every seed; the folder gets one JSON per run, runs.csv, curves.csv, curves.png and event files for
    TensorBoard. Finished runs are not run again, an interrupted one goes on after its last finished round. A run that fails does
    not end the others; the exit code is 1 then.
    """
    if ray is not None:
        check_ray()
    given = {name for name in ctx.params if getattr(ctx.get_parameter_source(name), "name", "") == "COMMANDLINE"}
    if {"seed", "seeds"} <= given:
        raise bad_input("--seed is one run's root and --seeds those of several; leave one of them out")
    if resume is not None:
        stray = sorted(given - {"resume", "workers", "ray", "force", "as_json", "tensorboard", "plot"})
        if stray:
            raise bad_input(f"--resume goes on with the folder's own options; leave out {', '.join(stray)}")
        folder, batch = resume, _resumed(resume)
    else:
        options = {name: value for name, value in ctx.params.items() if name not in _BESIDE}
        options["data"] = data_text(data)
        folder = out or free_folder("simulate-out")
        if paper is None:
            batch = _planned(options, method or ["fedcg"], seeds or str(seed), params or [])
        else:
            asked = seeds or (str(seed) if "seed" in given else None)
            batch = _of_table(paper, options, frozenset(given), method or [], asked, params or [])
    if ray is None:  # a cluster may have what this machine lacks
        _check_device(batch.runs[0].setting.device)
    if tensorboard:
        _check_events()
    if resume is None:
        _remember(batch, folder, force=force)
    lanes = _local_lanes(batch, workers) if ray is None else _ray_lanes(batch, workers, ray)
    _run(batch, folder, lanes, force=force, tensorboard=tensorboard, plot=plot, as_json=as_json)


def _check_events() -> None:
    from experiments.simulation.tensorboard import check_installed

    try:
        check_installed()
    except ExperimentError as error:
        raise bad_input(str(error)) from error


def _planned(options: dict[str, Any], methods: list[str], seeds: str, params: list[str]) -> Batch:
    try:
        return _checked(plan_batch(options, methods, parse_seeds(seeds), parse_method_params(params, tuple(methods))))
    except ValidationError as error:
        raise bad_input(reasons(error)) from error
    except ExperimentError as error:
        raise bad_input(str(error)) from error


def _of_table(
    paper: str, options: dict[str, Any], given: frozenset[str], methods: list[str], seeds: str | None, params: list[str]
) -> Batch:
    if "variant" in given:
        raise bad_input("--paper names the variants itself; choose some by --method METHOD/VARIANT")
    try:
        numbers = () if seeds is None else parse_seeds(seeds)
        rows = {row.method for preset in find_presets(paper) for row in preset.rows.values()}
        return _checked(table_batch(paper, options, given, methods, numbers, parse_method_params(params, tuple(rows))))
    except ValidationError as error:
        raise bad_input(reasons(error)) from error
    except ExperimentError as error:
        raise bad_input(str(error)) from error


def _remember(batch: Batch, folder: Path, *, force: bool) -> None:
    try:
        save_batch(batch, folder, force=force)
    except ExperimentError as error:
        raise bad_input(str(error)) from error
    except OSError as error:
        raise bad_input(
            f"--out {folder}: nothing can be written there ({error.strerror}); choose another folder"
        ) from error


def _resumed(folder: Path) -> Batch:
    try:
        return _checked(load_batch(folder))
    except ExperimentError as error:
        raise bad_input(str(error)) from error


def _checked(batch: Batch) -> Batch:
    """End the command before anything is started when a method, a network, the data or a deal can't be had."""
    settings = [run.setting for run in batch.runs]
    for setting in settings:
        check(setting)
        _check_method(setting)
    sources = {data: open_data(setting) for data, setting in {setting.data: setting for setting in settings}.items()}
    for setting in {(setting.data, setting.network, setting.image_size): setting for setting in settings}.values():
        _check_network(setting, sources[setting.data])
    try:
        for data, deal in dict.fromkeys((setting.data, setting.deal()) for setting in settings):
            deal_out(sources[data], deal)
    except ExperimentError as error:
        raise bad_input(str(error)) from error
    return batch


def _check_method(setting: RunSetting) -> None:
    from fedcg.learning.networks.discriminators import DISCRIMINATORS  # torch comes with them: not for --help
    from fedcg.learning.networks.generators import GENERATORS

    method, params = get_method(setting.method), setting.all_params()
    unknown = sorted(params.keys() - method.params_type.model_fields.keys())
    if unknown:
        raise bad_input(
            f"{method.name} has no parameter {', '.join(unknown)}; `fedcg method show {method.name}` prints those it has"
        )
    try:
        method.params_type.model_validate(params)
    except ValidationError as error:
        raise bad_input(f"{method.name}: {reasons(error)}") from error
    for kind, name, known in (
        ("generator", setting.generator, GENERATORS),
        ("discriminator", setting.discriminator, DISCRIMINATORS),
    ):
        if name is not None and name not in known:
            raise bad_input(f"no {kind} {name!r}; there are {', '.join(sorted(known))}")
    if method.needs_public and not setting.public_images:
        raise bad_input(f"{method.name} distils on unlabelled public images: hold some out with --public-images N")


def _check_network(setting: RunSetting, source: Source) -> None:
    """The split's least size of an image; one of the user's own is run on random images of the data's form."""
    from fedcg.learning.networks.assembly import split_of

    try:
        split_of(plan_from_mapping(setting.plan(source)))
    except (NetworkError, ValidationError) as error:
        raise bad_input(reasons(error) if isinstance(error, ValidationError) else str(error)) from error


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise bad_input(f"--device {device}: {str(error).splitlines()[0]}") from error


def _local_lanes(batch: Batch, workers: int | None) -> AbstractContextManager[Lanes]:
    settings = [planned.setting for planned in batch.runs]
    batched = settings[0].batched_clients
    if batched and workers not in {None, 1}:
        raise bad_input("--batched-clients train in one process; leave out --workers")
    count = workers or default_workers(max(setting.clients for setting in settings), settings[0].device)
    return open_lanes(1 if batched else count, settings[0].threads, batched=batched)


def _ray_lanes(batch: Batch, workers: int | None, address: str) -> AbstractContextManager[Lanes]:
    if batch.runs[0].setting.batched_clients:
        raise bad_input("--batched-clients train in one process; leave out --ray")
    console = Console(stderr=True)

    def tell(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return open_ray_lanes(address, [planned.setting for planned in batch.runs], workers, tell)


def _run(
    batch: Batch,
    folder: Path,
    lanes: AbstractContextManager[Lanes],
    *,
    force: bool,
    tensorboard: bool,
    plot: bool,
    as_json: bool,
) -> None:
    from experiments.simulation.batch_runner import BatchRunner, Beside, table

    console = Console(stderr=True)
    try:
        with lanes as opened:
            done = BatchRunner(folder, opened, console, Beside(tensorboard, plot))
            records, failed = done.run(batch, force=force)
    except KeyboardInterrupt:
        console.print(f"Go on with: fedcg simulate --resume {folder}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    except ExperimentError as error:
        raise bad_input(str(error)) from error
    if as_json:
        failures = [{"run": run.name, "reason": run.reason} for run in failed]
        typer.echo(json.dumps({"runs": records, "failures": failures}))
    elif records:
        Console().print(table(records))
    console.print(f"records, tables and curves: {folder}", markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


class _SimulateCommand(TyperCommand):
    """The command, with an option whose value may be left out."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_address(args))


def with_address(arguments: list[str]) -> list[str]:
    """Arguments in which `--ray` has its value: `local` where none follows it."""
    bare = [
        argument == "--ray" and (not following or following[0].startswith("-"))
        for argument, following in ((arguments[at], arguments[at + 1 : at + 2]) for at in range(len(arguments)))
    ]
    return [f"--ray={LOCAL}" if is_bare else argument for argument, is_bare in zip(arguments, bare, strict=True)]


simulate_app = typer.Typer(add_completion=False)
simulate_app.command("simulate", cls=_SimulateCommand)(simulate_command)
