"""Chooses this device's backbone from a spec's list (`[training] backbone`). Torch-free, because agent and trainer both use it."""

import contextlib

from devices.detect import detect
from devices.nvidia import torch_obstacle
from devices.profile import DeviceProfile, NotTrainableError, plan_training
from edge_client.config import AUTO, AgentConfig
from edge_client.store.private_store import PrivateStore
from fedcg.learning.errors import NetworkError
from fedcg.learning.spec import FederationSpec, NetworkChoice
from fedcg.learning.split_names import least_work

_FEW_CPUS = 4


def choose_backbone(network: NetworkChoice, wanted: str, kept: str, *, small: bool) -> str:
    """The backbone of this device, one of `network.backbone_names`.

    `auto` keeps the backbone trained before. Otherwise it is the split's default or, on a small device, the backbone with the least work.

    Args:
        network: of the spec.
        wanted: `[training] backbone`.
        kept: the backbone of the private state; empty if nothing was trained.
        small: whether the device is small (`is_small`).

    Raises:
        NetworkError: the spec does not list the wanted backbone, or the private state has another one.
    """
    names = network.backbone_names
    if wanted != AUTO and wanted not in names:
        raise NetworkError(
            f'[training] backbone = "{wanted}" is not allowed by the federation. Use one of {", ".join(names)}, or "{AUTO}"'
        )
    chosen = wanted if wanted != AUTO else kept or (least_work(names) if small else names[0])
    if kept and chosen != kept:
        raise NetworkError(
            f"the private networks of this device were trained with {kept}, but [training] backbone is now {chosen}: set it back, or leave "
            "the federation and enrol again to start from the beginning"
        )
    return chosen


def is_small(box: DeviceProfile, device: str) -> bool:
    """Whether a device trains on fewer than 4 CPUs without a GPU, or has memory for only a share of the batch, like an Orin Nano 4GB.

    Args:
        box: the hardware.
        device: `[training] device`.
    """
    try:
        plan = plan_training(box, device=device, gpu_problem=torch_obstacle())
    except NotTrainableError:
        return True
    return plan.batch_scale < 1 or (plan.device == "cpu" and (box.cpus or 1) < _FEW_CPUS)


def known_spec(store: PrivateStore) -> FederationSpec | None:
    """The federation's spec: the one of the newest round, or the only stored one."""
    generation = store.generations.newest()
    digests = store.spec_digests() if generation is None else frozenset({generation.spec})
    return store.spec(next(iter(digests))) if len(digests) == 1 else None


def private_start(config: AgentConfig, store: PrivateStore) -> str:
    """How this device's private networks were initialised, as text (`NetworkChoice.private_start`)."""
    spec, has_secret = known_spec(store), store.cohort_secret() is not None
    network = NetworkChoice() if spec is None else spec.network
    with contextlib.suppress(NetworkError):  # falls back to all allowed backbones if [training] names none of them
        network = network if spec is None else network.with_backbone(own_backbone(config, store, spec))
    return network.private_start(has_secret)


def own_backbone(config: AgentConfig, store: PrivateStore, spec: FederationSpec) -> str:
    """The backbone of this device under a spec; the split's default if the spec lists no others.

    Raises:
        NetworkError: see `choose_backbone`.
        StoreError: the private store can't be read.
    """
    if not spec.network.backbones:
        return spec.network.backbone_names[0]
    newest = store.generations.newest()
    kept = newest.backbone if newest is not None and newest.spec == spec.digest else ""
    small = config.training.backbone == AUTO and not kept and is_small(detect(), config.training.device)
    return choose_backbone(spec.network, config.training.backbone, kept, small=small)
