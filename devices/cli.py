"""`fedcg profile`: shows the machine, and where and with what batch training would run on it."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from devices.detect import detect, runtime_providers
from devices.files import LIVE_ROOT
from devices.nvidia import torch_obstacle
from devices.profile import GIB, DeviceProfile, Gpu, NotTrainableError, TrainingPlan, plan_training
from devices.telemetry import Telemetry, read_telemetry
from fedcg.errors import NOT_FOUND, BadInputError
from fedcg.terminal import print_data

UNAVAILABLE = "unavailable"


def profile_command(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; null means unavailable.")] = False,
    root: Annotated[Path, typer.Option("--root", help="Read a recorded file tree instead of this box.")] = LIVE_ROOT,
) -> None:
    """Show this machine's hardware and the resources that training on it would use.

    Example: fedcg profile --json
    """
    if not root.is_dir():
        raise BadInputError(f"{root}: there is no such folder", exit_code=NOT_FOUND)
    profile = detect(root)
    plan = _plan(profile, torch_obstacle() if root == LIVE_ROOT else "")
    live = read_telemetry(Path.cwd(), root)
    if as_json:
        now = {**asdict(live), "hottest_c": live.hottest_c, "is_hot": live.is_hot, "condition": live.condition.value}
        here = asdict(profile) | {"providers": runtime_providers() if root == LIVE_ROOT else None}
        print_data({"profile": here, "plan": asdict(plan) if plan else None, "now": now})
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    providers = ", ".join((runtime_providers() if root == LIVE_ROOT else None) or ()) or UNAVAILABLE
    for name, value in [*_rows(profile, plan), ("ONNX Runtime", providers), ("now", _describe_now(live))]:
        table.add_row(name, value)
    Console().print(table)


def _plan(profile: DeviceProfile, gpu_problem: str) -> TrainingPlan | None:
    try:
        return plan_training(profile, gpu_problem=gpu_problem)
    except NotTrainableError:
        return None


def _rows(profile: DeviceProfile, plan: TrainingPlan | None) -> list[tuple[str, str]]:
    rows = [
        ("kind", profile.kind.value),
        ("model", profile.model or UNAVAILABLE),
        ("processor", profile.cpu_model or UNAVAILABLE),
        ("architecture", profile.architecture or UNAVAILABLE),
        ("CPUs", UNAVAILABLE if profile.cpus is None else str(profile.cpus)),
        ("memory", gib(profile.memory_bytes)),
        ("GPU", describe_gpu(profile.gpu)),
    ]
    rows.append(("precisions", UNAVAILABLE if profile.precisions is None else ", ".join(profile.precisions)))
    if profile.kind.value == "jetson":
        rows.append(("Jetson Linux", str(profile.l4t or UNAVAILABLE)))
        if (builds := profile.builds) is not None:
            detail = f"torch: {builds.torch}; onnxruntime: {builds.onnxruntime}; Python {builds.python}"
            rows.append(("builds for its GPU", detail))
    rows.append(("can train", f"{'yes' if profile.trainable.possible else 'no'}, {profile.trainable.reason}"))
    if plan is not None:
        rows.append(
            ("plan", f"{plan.device}, {plan.threads} threads, {plan.batch_scale:.0%} of the batch: {plan.reason}")
        )
    return rows


def _describe_now(live: Telemetry) -> str:
    hottest = UNAVAILABLE if live.hottest_c is None else f"{live.hottest_c:.0f} °C"
    battery = "none found" if live.supply.battery_percent is None else f"{live.supply.battery_percent} %"
    return f"{live.condition.value}: temperature {hottest}, battery {battery}, free disk {gib(live.free_disk_bytes)}"


def gib(memory_bytes: int | None) -> str:
    """A size in words."""
    return UNAVAILABLE if memory_bytes is None else f"{memory_bytes / GIB:.1f} GiB"


def describe_gpu(gpu: Gpu | None) -> str:
    """A GPU in words."""
    if gpu is None:
        return "none found"
    capability = ".".join(map(str, gpu.compute_capability)) if gpu.compute_capability else UNAVAILABLE
    shared = " (shared with the CPU)" if gpu.shares_memory else ""
    return f"{gpu.name}, memory {gib(gpu.memory_bytes)}{shared}, compute capability {capability}, driver {gpu.driver or UNAVAILABLE}"
