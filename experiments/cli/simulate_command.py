"""`fedcg simulate`."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from pydantic import BaseModel, Field
from rich.console import Console

from experiments.data.deal import deal_out
from experiments.data.source import Source
from experiments.errors import OptionError
from experiments.papers.catalogue import find_presets
from experiments.papers.plan import plan_runs
from experiments.parallel.ray_cluster import check_ray
from experiments.settings import (
    DEMO_NETWORKS,
    Values,
    bad_input_ends,
    check,
    check_params,
    data_text,
    free_folder,
    of_method,
    options_of,
    parse_method_params,
    parse_params,
    parse_seeds,
)
from experiments.simulation.batch import Batch, RunSetting, load_batch, plan_batch, save_batch
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.method import silent
from fedcg.learning.privacy import PrivacySettings, parse_mechanisms
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import image_form, plan_from_mapping
from fedcg.terminal import print_data
from fedcg.tracking import TRACK_FORMS, check_track

if TYPE_CHECKING:
    from experiments.simulation.single_run import Simulator

_WITH_RESUME = frozenset(
    {"resume", "workers", "ray", "force", "keep_updates", "as_json", "tensorboard", "track", "plot"}
)


class SimulateOptions(BaseModel):
    """The options of a simulation in addition to the settings of its runs."""

    project: Annotated[
        Path | None, Field(description="folder with a client.py (docs/how-to/python.md); its sites are the clients")
    ] = None
    method: Annotated[
        list[str], Field(description="fedcg (default), fedmd_cg, local, ...: see `fedcg method list`; repeat for more")
    ] = []
    params: Annotated[
        list[str], Field(description="parameter: key=value for every method, METHOD.key=value for one; repeat for more")
    ] = []
    privacy: Annotated[
        list[str],
        Field(
            description="mechanism of every client, KEY=VALUE or dp_sgd.KEY=VALUE, e.g. update_clip=1; repeat for more; "
            "see docs/how-to/protect.md"
        ),
    ] = []
    defence_params: Annotated[
        list[str], Field(description="parameter of the defence, KEY=VALUE, e.g. v_e=0.5; repeat for more")
    ] = []
    paper: Annotated[
        str | None,
        Field(
            description="runs of a published table, e.g. fedcg:table1:cifar10-4; other options override it; see docs/research/papers.md"
        ),
    ] = None
    seeds: Annotated[str | None, Field(description="seeds, e.g. 0,1,2 or 0-4: one run for each")] = None
    seed: Annotated[int, Field(description="seed of a single run")] = 0
    workers: Annotated[
        int | None, Field(ge=1, description="processes; default: one per CPU, at most one per client, 1 on cuda")
    ] = None
    ray: Annotated[
        str | None, Field(description="spread the local rounds of a run over a running Ray cluster: auto or HOST:PORT")
    ] = None
    out: Annotated[Path | None, Field(description="folder; default: ./simulate-out, or the next free name")] = None
    resume: Annotated[Path | None, Field(description="resume in this folder with its own options")] = None
    force: Annotated[bool, Field(description="repeat finished runs of this call")] = False
    keep_updates: Annotated[
        str | None,
        Field(description="record updates for the audit, with the clients' images: all rounds, or some, e.g. 1,5,10"),
    ] = None
    tensorboard: Annotated[bool, Field(description="write event files")] = True
    track: Annotated[str | None, Field(description=f"send settings and figures to {TRACK_FORMS}")] = None
    plot: Annotated[bool, Field(description="draw curves.png")] = True
    as_json: Annotated[bool, Field(description="print the runs' records instead of a table")] = False


@options_of(RunSetting, SimulateOptions, defaults={"quick": True, "rounds": 4})
def simulate_command(values: Values, typed: frozenset[str]) -> None:
    """Simulate federations without a network, with the same functions that agents and coordinator call.

    Every method runs with every seed. The folder gets one JSON per run, runs.csv, curves.csv, curves.png and event
    files for TensorBoard. Finished runs are not repeated. An interrupted run resumes after its last finished round. A
    failed run does not stop the others, but the exit code is 1.

    Example: fedcg simulate --method fedcg --method local --seeds 0-2
    """
    with bad_input_ends():
        options = SimulateOptions.model_validate({name: values[name] for name in SimulateOptions.model_fields})
        if options.ray is not None:
            check_ray()
            if options.workers is not None:
                raise OptionError("--workers uses processes of this machine, --ray uses the cluster's CPUs; choose one")
        if {"seed", "seeds"} <= typed:
            raise OptionError("--seed is for a single run, --seeds for several; omit one of them")
        if options.project is not None:
            _simulate_project(options.project, values, options, typed)
            return
        if options.resume is None:
            folder, batch = options.out or free_folder("simulate-out"), _asked(values, options, typed)
        else:
            stray = sorted(typed - _WITH_RESUME)
            if stray:
                raise OptionError(f"--resume uses the folder's own options; omit {', '.join(stray)}")
            folder, batch = options.resume, load_batch(options.resume)
        if options.keep_updates is not None:
            batch = batch.keeping(options.keep_updates)
        _check(batch)
        _check_device(batch.runs[0].setting.device)
        tracks = [f"tensorboard:{folder / 'tensorboard'}"] if options.tensorboard else []
        for each in tracks:
            check_track(each, "--no-tensorboard")
        if options.track is not None:
            check_track(options.track)
            tracks.append(options.track)
        if options.resume is None or options.keep_updates is not None:
            save_batch(batch, folder, force=options.force)
        _run(batch, folder, options, tracks)


def _simulate_project(project: Path, values: Values, options: SimulateOptions, typed: frozenset[str]) -> None:
    """Run a project's own clients; its plan.toml applies unless an option was typed."""
    from experiments.face import simulate
    from experiments.simulation.batch_runner import table
    from fedcg.learning.project import CHOSEN, PLAN_FILE, program_of, written_plan
    from fedcg.learning.spec import FederationPlan

    if stray := typed & _NOT_OF_PROJECTS:
        raise OptionError(f"{', '.join(sorted(stray))}: not allowed with a project; set it in {project}/client.py")
    program, plan = program_of(project), written_plan(project)
    if strange := plan.keys() - FederationPlan.model_fields:
        raise OptionError(f"{project / PLAN_FILE}: unknown setting: {', '.join(sorted(strange))}")
    methods = tuple(options.method) or (str(plan.get("method", "fedcg")),)
    params, seeds = parse_method_params(options.params, methods), parse_seeds(options.seeds or str(options.seed))
    if not typed & {"seed", "seeds"}:
        seeds = (plan.get("seed", 0),)
    folder = options.out or free_folder("simulate-out")
    planned = {name: one for name, one in {**plan, **plan.get("network", {})}.items() if name in {"rounds", *CHOSEN}}
    known = RunSetting.model_fields.keys() - SimulateOptions.model_fields.keys()
    chosen = {
        "quick": values["quick"] and "quick" in typed,
        **planned,
        **{name: values[name] for name in typed & known},
    }
    if options.privacy:
        chosen["privacy"] = parse_mechanisms(options.privacy)
    records = []
    for method in methods:
        of_plan = dict(plan.get("params", {})) if method == plan.get("method") else {}
        of_plan = {name: value for name, value in of_plan.items() if _OPTIONS.get(name, name) not in typed}
        for seed in seeds:
            clients = {site: program.client(site, seed) for site in program.sites()}
            usual = get_method(method).params_type().epochs
            own = {"local_epochs": usual, "params": {**of_plan, **of_method(params, method)}, **chosen}
            run = simulate(clients, method, seed=seed, out=folder, workers=options.workers or 1, **own)
            records.append(dict(run.record))
    if options.as_json:
        print_data({"runs": records, "failures": []})
    else:
        Console().print(table(records))
    Console(stderr=True).print(f"records and networks: {folder}", markup=False, highlight=False, soft_wrap=True)


_OPTIONS = {"epochs": "local_epochs", "steps": "local_steps"}
"""Parameters of methods that have options under other names."""
_NOT_OF_PROJECTS = frozenset(
    {"paper", "ray", "resume", "keep_updates", "defence", "defence_params", "clients", "network", "data"}
)


def _asked(values: Values, options: SimulateOptions, typed: frozenset[str]) -> Batch:
    """Return the runs for the options, or those of the named published table."""
    own = RunSetting.model_fields.keys() - SimulateOptions.model_fields.keys()
    fields = {name: values[name] for name in values if name in own} | {"data": data_text(values["data"])}
    fields["privacy"] = parse_mechanisms(options.privacy)
    fields["defence_params"] = parse_params(options.defence_params, "--defence-set")
    if options.paper is None:
        methods = options.method or ["fedcg"]
        params, networks = parse_method_params(options.params, tuple(methods)), dict[str, dict[str, object]]()
        if "network" not in typed:
            needed = {method: DEMO_NETWORKS.get(method, {}) for method in methods}
            networks = {method: {k: v for k, v in of.items() if k not in typed} for method, of in needed.items()}
        return plan_batch(fields, methods, parse_seeds(options.seeds or str(options.seed)), params, networks)
    if "variant" in typed:
        raise OptionError("--paper defines the variants; select some with --method METHOD/VARIANT")
    text = options.seeds or (str(options.seed) if "seed" in typed else None)
    seeds = () if text is None else parse_seeds(text)
    rows = sorted({row.method for preset in find_presets(options.paper) for row in preset.rows.values()})
    params = parse_method_params(options.params, tuple(rows))
    setting = {name: value for name, value in fields.items() if name in typed}
    runs = plan_runs(options.paper, methods=options.method, seeds=seeds, setting=setting, params=params)
    return Batch(runs=runs)


def _check(batch: Batch) -> None:
    """Stop the command before anything starts if a method, a network, the data or a partition is unavailable."""
    settings = [run.setting for run in batch.runs]
    for setting in settings:
        check(setting)
        _check_method(setting)
    sources = {data: setting.source() for data, setting in {setting.data: setting for setting in settings}.items()}
    plans: dict[tuple[str, PrivacySettings, str], RunSetting] = {}
    for setting in settings:  # networks are the same for all seeds
        plan = {**setting.plan(sources[setting.data]), "seed": 0}
        plans[json.dumps(plan, sort_keys=True), setting.privacy, setting.defence_label] = setting
    for setting in plans.values():
        _check_network(setting, sources[setting.data])
        _check_defence(setting, sources[setting.data])
    for data, deal in dict.fromkeys((setting.data, setting.deal()) for setting in settings):
        deal_out(sources[data], deal)


def _check_method(setting: RunSetting) -> None:
    from fedcg.learning.networks.gan import (
        DISCRIMINATORS,  # they import torch, which --help does not need
        generator_names,
    )

    check_params(setting)
    method = get_method(setting.method)
    if setting.start != "cohort" and method.params_type.model_validate(setting.all_params()).needs_cohort:
        raise OptionError(f"{method.name}: needs the cohort secret: --start cohort, or --set key=device")
    for kind, name, known in (
        ("generator", setting.generator, generator_names()),
        ("discriminator", setting.discriminator, DISCRIMINATORS),
    ):
        if name is not None and name not in known:
            raise OptionError(f"unknown {kind} {name!r}; choose {', '.join(sorted(known))}")
    if method.needs.public and not setting.public_images:
        raise OptionError(f"{method.name} distils on unlabelled public images: hold some out with --public-images N")


def _check_network(setting: RunSetting, source: Source) -> None:
    """Raise what a method, the split's minimum image size, or mechanisms refuse; a custom split is run on random images."""
    from fedcg.learning.mechanisms.protected_round import check_mechanisms
    from fedcg.learning.networks.plans import complete_spec

    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    check_mechanisms(spec, get_method(setting.method), setting.privacy)


def _check_defence(setting: RunSetting, source: Source) -> None:
    """Raise what a defence refuses: the images' form, or a missing cohort secret."""
    if setting.defence is None:
        return
    defence, params = defence_of(setting.defence, setting.defence_params)
    if defence.check is not None:
        form, streams = image_form(setting.input_form(source), setting.defence), Streams(b"")
        place = DefencePlace(streams, silent, cohort=None if setting.start == "public" else streams)
        defence.check(params, place, form.tensor_shape)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter if torch was built without CUDA
        raise OptionError(f"--device {device}: {str(error).splitlines()[0]}") from error


def _opened(batch: Batch, workers: int | None, ray: str | None) -> AbstractContextManager[Simulator]:
    from experiments.simulation.batch_runner import default_workers, open_ray_workers, open_workers

    settings = [planned.setting for planned in batch.runs]
    if ray is not None:
        announce = partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
        return open_ray_workers(ray, settings, announce)
    count = workers or default_workers(max(setting.clients for setting in settings), settings[0].device)
    return open_workers(count, settings[0].threads)


def _run(batch: Batch, folder: Path, options: SimulateOptions, tracks: list[str]) -> None:
    from experiments.simulation.batch_runner import BatchRunner, table
    from experiments.simulation.recorded_updates import UPDATES_FOLDER, audit_command

    console = Console(stderr=True)
    try:
        with _opened(batch, options.workers, options.ray) as opened:
            done = BatchRunner(folder, opened, console, tracks=tracks, picture=options.plot)
            records, failed = done.run(batch, force=options.force)
    except KeyboardInterrupt:
        console.print(f"Resume with: fedcg simulate --resume {folder}", markup=False, soft_wrap=True)
        raise typer.Exit(130) from None
    if options.as_json:
        failures = [{"run": run.name, "reason": run.reason} for run in failed]
        print_data({"runs": records, "failures": failures})
    elif records:
        Console().print(table(records))
    console.print(f"records, tables and curves: {folder}", markup=False, highlight=False, soft_wrap=True)
    recordings = [folder / UPDATES_FOLDER / run.setting.name for run in batch.runs if run.keep_updates]
    command = next(filter(None, map(audit_command, recordings)), None)
    if command is not None:
        line = f"recorded updates: {folder / UPDATES_FOLDER}; audit one with: {command}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


simulate_app = typer.Typer(add_completion=False)
simulate_app.command("simulate")(simulate_command)
