"""Whether this device can train and predict: checks of `fedcg doctor`, and readings of `fedcg doctor --hardware`. Never imports torch."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

from devices.detect import detect, runtime_obstacle, runtime_providers
from devices.eligibility import EligibilitySettings, obstacles
from devices.files import LIVE_ROOT
from devices.nvidia import torch_obstacle
from devices.profile import UNAVAILABLE, DeviceProfile, NotTrainableError, describe_gpu, gib, plan_training
from devices.telemetry import Sensors, Telemetry, Zone, read_telemetry
from edge_client.cli.doctor.findings import Finding, Result, existing_place, spec_of
from edge_client.config import AUTO, AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.own_backbone import own_backbone
from edge_client.store.private_store import open_store
from fedcg.learning.errors import NetworkError
from fedcg.learning.split_names import backbone_of, files_of_weights, pinned_weights
from fedcg.sentences import texts
from fedcg.wire.messages.schemas import DeclineReason

RATE_S = 1.0
"""Time between two readings of the counters, if there are any."""


def examine_hardware(
    settings: EligibilitySettings, store: Path, root: Path = LIVE_ROOT, wait: Callable[[float], None] = time.sleep
) -> tuple[Finding, ...]:
    """The hardware and its readings, each with a verdict: "ok", "warning" (works, but needs attention) or "failed" (can't train).

    Args:
        settings: of the device's owner.
        store: path of the private store, which may not exist yet.
        root: the file system to read, "/" or a recorded tree.
        wait: sleeps for some seconds.
    """
    store = existing_place(store)
    profile, sensors = detect(root), Sensors(store, root)
    read = sensors.read()
    if read.counters:
        wait(RATE_S)
        read = sensors.read()
    reasons = obstacles(read, settings, datetime.now().astimezone())
    found = {one.obstacle: one.detail for one in reasons}

    def judged(check: str, detail: str, obstacle: DeclineReason, warning: str = "") -> Finding:
        if obstacle in found:
            return Finding(
                check, "failed", f"{detail}: can't train because {found[obstacle]}", texts().declined[obstacle]
            )
        return Finding(check, "warning" if warning else "ok", detail, warning)

    memory = f"{gib(read.free_memory_bytes)} of {gib(profile.memory_bytes)} available"
    slowed = "training continues, at lower clocks" if read.causes.software else ""
    application = "busy" if DeclineReason.RESERVED in found else "does not block training"
    return (
        *_box(profile, root),
        *(_zone(zone, settings) for zone in read.zones),
        *([] if read.zones else [Finding("temperature", "ok", UNAVAILABLE)]),
        *(Finding("power", "ok", f"{rail.name} {rail.watts:.2f} W") for rail in read.rails),
        Finding("power in all", "ok", f"{read.drawn.watts:.2f} W ({read.drawn.name})" if read.drawn else UNAVAILABLE),
        judged("throttling", _throttling(read), DeclineReason.THROTTLED, slowed),
        judged("supply", _supply(read), DeclineReason.ON_BATTERY, _no_effect("on_mains", settings, read)),
        judged("memory", memory, DeclineReason.LOW_MEMORY),
        judged("disk", f"{gib(read.free_disk_bytes)} free at {store}", DeclineReason.LOW_DISK),
        judged("links", _links(read), DeclineReason.METERED, _no_effect("unmetered", settings, read)),
        judged("quiet hours", ", ".join(settings.quiet_hours) or "none", DeclineReason.QUIET_HOURS),
        judged("application", application, DeclineReason.RESERVED),
    )


def _box(profile: DeviceProfile, root: Path) -> Iterator[Finding]:
    known = "" if profile.known_as is None else f" (known as {profile.known_as})"
    cpus = UNAVAILABLE if profile.cpus is None else str(profile.cpus)
    yield Finding("device", "ok", f"{profile.model or UNAVAILABLE}{known}, {profile.architecture or UNAVAILABLE}")
    yield Finding("processor", "ok", f"{profile.cpu_model or UNAVAILABLE}, CPUs: {cpus}")
    yield Finding("GPU", "ok", describe_gpu(profile.gpu))
    providers = runtime_providers() if root == LIVE_ROOT else None
    obstacle = "" if providers is None else runtime_obstacle(profile)
    yield Finding("ONNX Runtime", "warning" if obstacle else "ok", ", ".join(providers or ()) or UNAVAILABLE, obstacle)
    if (builds := profile.builds) is not None:
        detail = f"{profile.l4t or UNAVAILABLE}: torch {builds.torch}; onnxruntime {builds.onnxruntime}; Python {builds.python}"
        yield Finding("builds for its GPU", "ok", detail)
    try:
        plan = plan_training(profile, gpu_problem=torch_obstacle() if root == LIVE_ROOT else "")
    except NotTrainableError:
        detail = f"can't train because {profile.trainable.reason}"
        yield Finding("training", "failed", detail, "this device can run a model, but can't train")
    else:
        size = f"{plan.threads} threads, {plan.batch_scale:.0%} of the batch"
        yield Finding("training", "ok", f"{plan.device}, {size}: {plan.reason}")


def _zone(zone: Zone, settings: EligibilitySettings) -> Finding:
    limit_c = min(zone.limit_c, settings.max_temperature_c or zone.limit_c)
    trips = {"passive": zone.passive_c, "hot": zone.hot_c, "critical": zone.critical_c}
    own = ", ".join(f"{name} {at:.0f}" for name, at in trips.items() if at is not None)
    detail = f"{zone.name} {zone.temperature_c:.0f} °C, trains below {limit_c:.0f} (own trip points: {own or 'none'})"
    if zone.temperature_c >= limit_c:
        return Finding(
            "temperature", "failed", f"{detail}: can't train because it is hot", texts().declined[DeclineReason.HOT]
        )
    is_warm = zone.passive_c is not None and zone.temperature_c >= zone.passive_c
    return Finding(
        "temperature", "warning" if is_warm else "ok", detail, "software lowers its clocks" if is_warm else ""
    )


def _throttling(read: Telemetry) -> str:
    causes = [*read.causes.software, *read.hardware_throttling]
    rates = [
        f"{name}: {count} since the start"
        + ("" if (rate := read.event_rates.get(name)) is None else f", {rate:.1f} a minute now")
        for name, count in read.counters.items()
    ]
    clock = [] if read.cpu_mhz is None else [f"CPU at {read.cpu_mhz[0]} of {read.cpu_mhz[1]} MHz"]
    return "; ".join([*(causes or ["none reported"]), *clock, *rates])


def _supply(read: Telemetry) -> str:
    mains = {None: UNAVAILABLE, True: "on mains", False: "not on mains"}[read.supply.on_mains]
    battery = "no battery" if read.supply.battery_percent is None else f"battery {read.supply.battery_percent} %"
    return f"{mains}, {battery}{', discharging' if read.supply.is_discharging else ''}"


def _links(read: Telemetry) -> str:
    shown = [
        f"{link.name} {link.state or UNAVAILABLE}"
        + ("" if link.mbit_s is None else f" {link.mbit_s} Mbit/s")
        + (" (default route)" if link.is_default else "")
        for link in read.links
    ]
    return ", ".join(shown) or UNAVAILABLE


def _no_effect(name: str, settings: EligibilitySettings, read: Telemetry) -> str:
    """The warning for a setting that has no effect, because this device does not report the needed reading."""
    missing = {
        "on_mains": settings.on_mains and read.supply.on_mains is None,
        "unmetered": settings.unmetered and not any(link.is_default for link in read.links),
    }
    return f"{name} under [eligibility] has no effect: this device does not report it" if missing[name] else ""


def check_training(config: AgentConfig, now: datetime) -> Result:
    """Check torch, the plan for this hardware, weights and backbone, and whether the device may train now."""
    missing = [name for name in ("torch", "onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        extra = "infer" if missing == ["onnxruntime"] else "edge,infer"
        advice = f"pip install 'fedcg-edge[{extra}]'; infer-gpu with a GPU"
        return "failed", f"{' and '.join(missing)} not installed", advice
    try:
        box, problem, wanted = detect(), torch_obstacle(), config.training
        plan = plan_training(box, device=wanted.device, threads=wanted.threads, gpu_problem=problem)
    except NotTrainableError as error:
        return "failed", str(error), "correct it; until then this device can run a model, but can't train"
    if (trouble := _networks(config)) is not None:
        return trouble
    if plan.device == "cpu" and plan.reason == problem:
        return "warning", f"on the CPU, although the device has a GPU ({describe_gpu(box.gpu)})", problem
    settings, place = config.eligibility, existing_place(config.store)
    reason = next(iter(obstacles(read_telemetry(place), settings, datetime.now().astimezone())), None)
    if reason is not None:
        return "warning", f"not now: {reason.detail}", "`fedcg doctor --hardware` shows all readings"
    return "ok", f"{plan.device}, {plan.threads} threads: {plan.reason}", ""


def check_predictions(config: AgentConfig, now: datetime) -> Result:
    """Check whether the installed ONNX Runtime uses this device's GPU."""
    providers = runtime_providers()
    if providers is None:
        return ("warning", "onnxruntime is not installed", "pip install 'fedcg-edge[infer]', or infer-gpu with a GPU")
    obstacle = runtime_obstacle(detect())
    return "warning" if obstacle else "ok", f"onnxruntime has {', '.join(providers)}", obstacle


def _networks(config: AgentConfig) -> Result | None:
    """Why the networks of `[training]` can't be used; None if they can."""
    wanted, weights = config.training.backbone, config.training.weights
    if weights is not None and not files_of_weights(weights):
        detail = f"[training] weights = {weights}: not a file, and not a folder with a .safetensors or .pth file"
        return "failed", detail, "correct the path, copy the file there, or omit the setting"
    spec = spec_of(config)
    try:
        if wanted != AUTO:
            backbone_of(wanted.partition("@")[0])
        if spec is not None:
            network = spec.network.with_backbone(own_backbone(config, open_store(config), spec))
            if network.weights is not None:
                pinned_weights(network.weights, weights)
    except (NetworkError, EdgeError) as error:
        return "failed", str(error), f'correct [training] in agent.toml; backbone = "{AUTO}" chooses by the hardware'
    return None
