"""The checks that this device can train as `[training]` in agent.toml asks, and predicts on its GPU. Never imports torch."""

from __future__ import annotations

from datetime import datetime
from importlib.util import find_spec

from devices.cli import describe_gpu
from devices.detect import detect, runtime_obstacle, runtime_providers
from devices.eligibility import eligibility, is_held
from devices.nvidia import torch_obstacle
from devices.profile import NotTrainableError, plan_training
from devices.telemetry import read_telemetry
from edge_client.cli.doctor.findings import Result, existing_place, spec_of
from edge_client.config import AUTO, AgentConfig
from edge_client.errors import EdgeError
from edge_client.store.own_backbone import own_backbone
from edge_client.store.private_store import open_store
from fedcg.learning.errors import NetworkError
from fedcg.learning.split_names import backbone_of, files_of_weights, pinned_weights


def check_training(config: AgentConfig, now: datetime) -> Result:
    """Torch, the plan for this hardware, weights and backbone, and whether the box may train now."""
    missing = [name for name in ("torch", "onnx", "onnxruntime") if find_spec(name) is None]
    if missing:
        extra = "infer" if missing == ["onnxruntime"] else "edge,infer"
        return (
            "failed",
            f"{' and '.join(missing)} not installed",
            f"pip install 'fedcg-edge[{extra}]'; infer-gpu with a GPU",
        )
    try:
        box, problem, wanted = detect(), torch_obstacle(), config.training
        plan = plan_training(
            box, device=wanted.device, threads=wanted.threads, gpu_problem=problem, precision=wanted.precision
        )
    except NotTrainableError as error:
        return "failed", str(error), "correct it; as it is this device can run a model, but not take part"
    if (trouble := _networks(config)) is not None:
        return trouble
    if plan.device == "cpu" and plan.reason == problem:
        return "warning", f"on the CPU, although there is a GPU ({describe_gpu(box.gpu)})", problem
    settings, place = config.eligibility, existing_place(config.store)
    reason = eligibility(read_telemetry(place), settings, datetime.now().astimezone(), held=is_held(settings))
    if reason is not None:
        return "warning", f"not now: {reason.detail}", "`fedcg doctor --hardware` shows all readings"
    return "ok", f"{plan.device}, {plan.threads} threads: {plan.reason}", ""


def check_predictions(config: AgentConfig, now: datetime) -> Result:
    """Whether the installed ONNX Runtime uses the GPU that is here."""
    providers = runtime_providers()
    if providers is None:
        return (
            "warning",
            "onnxruntime is not installed",
            "pip install 'fedcg-edge[infer]', with a GPU infer-gpu instead",
        )
    obstacle = runtime_obstacle(detect())
    return "warning" if obstacle else "ok", f"onnxruntime has {', '.join(providers)}", obstacle


def _networks(config: AgentConfig) -> Result | None:
    """Why the networks of `[training]` can't be had; None where nothing is against them."""
    wanted, weights = config.training.backbone, config.training.weights
    if weights is not None and not files_of_weights(weights):
        detail = f"[training] weights = {weights}: no file, and no folder with a .safetensors or .pth file"
        return "failed", detail, "correct the path, bring the file, or leave the setting out"
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
