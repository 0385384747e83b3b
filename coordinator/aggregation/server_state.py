"""Serialises the server state between rounds: the aggregate as an artifact, the rest as a safetensors file.

Imports torch: only the aggregation worker and the creation of a federation may import this.
"""

import json
import platform
from dataclasses import replace
from importlib.metadata import version
from typing import cast

import torch
from safetensors.torch import load, save

from coordinator.errors import AggregationError
from devices.files import LIVE_ROOT, cpuinfo_field
from fedcg.learning.method import Aggregate, Method, Parts, ServerState, check_finite
from fedcg.learning.networks.plans import on_wire
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.wire.artifacts.artifacts import ArtifactHeader, codecs_for, pack, unpack
from fedcg.wire.messages.schemas import COORDINATOR, SealedSum
from fedcg.wire.parts import Part, PartLayouts

MAX_LINE = 120


def aggregate_layouts(spec: FederationSpec, method: Method) -> PartLayouts:
    """The tensor layouts of this federation's aggregates."""
    return {part: spec.layouts[part] for part in sorted(on_wire(method.payload.down, frozenset(spec.sealed)))}


def before_first_sum(spec: FederationSpec, aggregate: Aggregate) -> Aggregate:
    """An aggregate with placeholders for the sealed numbers, before the first sum."""
    numbers = {layout.name: torch.zeros(layout.shape, dtype=torch.uint32) for layout in spec.layouts[Part.SEALED]}
    return replace(aggregate, parts={**aggregate.parts, Part.SEALED: numbers})


def pack_aggregate(
    spec: FederationSpec, aggregate: Aggregate, round_number: int, attempt: int, base: str | None, device: str
) -> bytes:
    """The artifact of an aggregate; deterministic for the same aggregate on the same machine.

    Args:
        spec: the federation's spec.
        aggregate: the result of the method's server half.
        round_number: the round that it closes; 0 for the initial one.
        attempt: the attempt that it closes.
        base: artifact id of the aggregate that the round started from.
        device: the torch device that computed it.

    Raises:
        CodecError: the spec's aggregate codec can't represent a number.
    """
    header = ArtifactHeader(
        kind="aggregate",
        method=spec.method,
        federation=spec.federation,
        round=round_number,
        attempt=attempt,
        client=COORDINATOR,
        base=base,
        label_distribution=aggregate.label_distribution,
        sums=cast("tuple[SealedSum, ...]", aggregate.sums),
        versions={name: version(name) for name in ("fedcg-edge", "torch", "numpy")}
        | {"python": platform.python_version()},
        determinism=_determinism(spec, device),
    )
    return pack(header, to_arrays(aggregate.parts), spec.aggregate_codec)


def unpack_aggregate(data: bytes, spec: FederationSpec, method: Method) -> Aggregate:
    """Decode the aggregate in an artifact as the clients do: both sides continue from the decoded numbers."""
    layouts = aggregate_layouts(spec, method)
    artifact = unpack(data, layouts, codecs=codecs_for(layouts, spec.aggregate_codec))
    return Aggregate(to_weights(artifact.parts), artifact.header.label_distribution, artifact.header.sums)


def encode_extras(state: ServerState) -> bytes:
    """Encode everything in a server state except its aggregate."""
    tensors = {
        f"{group}/{name}": tensor.detach().cpu().contiguous().clone()
        for group, weights in state.extras.items()
        for name, tensor in weights.items()
    }
    return save(tensors, metadata={"format": "1"})


def decode_extras(data: bytes) -> dict[str, dict[str, torch.Tensor]]:
    """Decode the extras from `encode_extras`."""
    extras: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load(data).items():
        group, _, name = key.partition("/")
        extras.setdefault(group, {})[name] = tensor
    return extras


def check_parts(parts: Parts, spec: FederationSpec, method: Method) -> None:
    """Check that a method's aggregate has exactly the parts declared as shared, with finite numbers.

    Raises:
        AggregationError: it has other parts.
        DivergedError: a number is not finite.
    """
    wanted = {part for part in aggregate_layouts(spec, method) if spec.layouts.get(part)}
    if set(parts) != wanted:
        found = sorted(part.value for part in parts)
        raise AggregationError(f"method {spec.method} gave parts {found}, not {sorted(part.value for part in wanted)}")
    check_finite({part: one for part, one in parts.items() if part is not Part.SEALED}, "after the merge")


def _determinism(spec: FederationSpec, device: str) -> dict[str, str]:
    plan = {key: value for key, value in sorted(spec.params.items()) if "batch" in key or "iterations" in key}
    return {
        "torch": _line(torch.__version__),
        "threads": str(torch.get_num_threads()),
        "device": _line(torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"),
        "cpu": _line(f"{platform.machine()} {cpuinfo_field(LIVE_ROOT, 'model name') or ''}".strip()),
        "batch_plan": _line(json.dumps(plan, separators=(",", ":"))),
    }


def _line(text: str) -> str:
    return "".join(letter if " " <= letter <= "~" else "?" for letter in text)[:MAX_LINE]
