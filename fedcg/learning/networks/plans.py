"""Completes an operator's plan to a spec. Computes a spec's initial weights and tensor layouts."""

import torch

from fedcg.learning.errors import NetworkError
from fedcg.learning.method import LabelCounts, Method, TrainingParams, Weights
from fedcg.learning.networks.assembly import build_part, layouts, weights_of
from fedcg.learning.networks.own_backbone import check_backbones
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.spec import TRAINER, FederationPlan, FederationSpec, NetworkSpec
from fedcg.wire.parts import DEFAULT_ALLOW_UPLOAD, Part, ReportField, TensorLayout, is_delta
from fedcg.wire.sealed_numbers import number_count

MOST_VARIANCE = 8192.0
"""Limit of batch norm variances in a sealed sum. A pretrained EfficientNet-Lite0 has 566."""
_REPORT = (ReportField.EXAMPLES, ReportField.ACCURACY, ReportField.LOSS, ReportField.HEALTH)


def initial_parts(
    spec: FederationSpec, private_root: bytes, wanted: frozenset[Part] | None = None
) -> dict[Part, Weights]:
    """Initial weights of every part of the spec's method.

    Args:
        spec: names networks, method and public seed.
        private_root: the cohort secret; `spec_root(spec.seed)` on a device without one, and on the coordinator, which
            does not use the private parts.
        wanted: only these parts; None: all.

    Raises:
        NetworkError: the weights pinned by the spec are not on this machine, or do not fit.
    """
    method = get_method(spec.method)
    public = (method.payload.up | method.payload.down | DEFAULT_ALLOW_UPLOAD) - frozenset(spec.sealed)
    result: dict[Part, Weights] = {}
    for part in sorted(method.payload.parts if wanted is None else method.payload.parts & wanted):
        is_elsewhere = spec.network.program is None and part in spec.network.starts_on_devices
        if part is Part.STATISTICS or is_elsewhere:
            result[part] = {layout.name: _zeros(layout) for layout in spec.layouts[part]}
            continue
        root = spec_root(spec.seed) if part in public else private_root
        stream = Streams(root).at(spec.federation, "initial").generator(part.value)
        with torch.no_grad():
            result[part] = weights_of(build_part(spec, part, stream))
    return result


def _zeros(layout: TensorLayout) -> torch.Tensor:
    return torch.zeros(layout.shape, dtype=torch.int64 if layout.dtype == "int64" else torch.float32)


def method_layouts(spec: NetworkSpec, method: Method) -> dict[Part, tuple[TensorLayout, ...]]:
    """The tensors of every part of a method's client: of its networks and its statistics."""
    stated = {} if method.payload.statistics is None else {Part.STATISTICS: method.payload.statistics(spec)}
    return layouts(spec, method.payload.parts - stated.keys()) | stated


def wire_layouts(spec: NetworkSpec, method: Method, sealed: frozenset[Part]) -> dict[Part, tuple[TensorLayout, ...]]:
    """Those tensors, and for sealed parts also their integer form on the wire, under the part's name in `Part.SEALED`."""
    found = method_layouts(spec, method)
    if not sealed:
        return found
    found |= {part: tuple(map(_with_room, found[part])) for part in sealed}
    sizes = {part.value: number_count(found[part]) for part in sorted(sealed)}
    numbers = tuple(TensorLayout(name=name, dtype="uint32", shape=(size,)) for name, size in sizes.items())
    return {**found, Part.SEALED: numbers}


def _with_room(layout: TensorLayout) -> TensorLayout:
    """Raise the limit for batch norm variances. Those of activations are in the hundreds, while weights are below ten."""
    is_variance = layout.low is None and layout.name.endswith("running_var")
    return layout.model_copy(update={"low": 0.0, "high": MOST_VARIANCE}) if is_variance else layout


def on_wire(parts: frozenset[Part], sealed: frozenset[Part]) -> frozenset[Part]:
    """Parts as sent on the wire if some are sealed."""
    return parts - sealed | ({Part.SEALED} if parts & sealed else frozenset())


def sealed_parts(plan: FederationPlan, method: Method) -> frozenset[Part]:
    """The sealed parts of a plan's updates: those of the method and those of the plan.

    Raises:
        NetworkError: parts that the method does not share, or does not only average.
    """
    if wrong := frozenset(plan.sealed) - method.payload.sealed - method.payload.sealable:
        can = ", ".join(sorted(part.value for part in method.payload.sealable)) or "none"
        names = ", ".join(sorted(part.value for part in wrong))
        raise NetworkError(f"{method.name}: sealed = {names} is not supported; it only averages: {can}")
    sealed = method.payload.sealed | frozenset(plan.sealed)
    if sealed and plan.params.get("average", "mean") != "mean":
        raise NetworkError(f"{method.name}: sealed parts support only the mean: set average = mean, or omit sealed")
    return sealed


def complete_spec(plan: FederationPlan) -> FederationSpec:
    """Check an operator's plan and complete it with defaults, tensor layouts, payload and report fields.

    `report` lists every field that a device MAY report. A method needs EXAMPLES, and LABEL_COUNTS unless listed as
    optional.

    Raises:
        ValueError: parameters that are unknown to the method or out of range; names each.
        LearningError: an unknown method or network, or an input form that the split does not support.
    """
    method = get_method(plan.method)
    params = method.params_type.model_validate(plan.params)
    if problem := method.needs.networks(plan):
        raise NetworkError(f"{method.name}: {problem}")
    if plan.network.split == TRAINER and not method.takes_trainer:
        raise NetworkError(
            f"{method.name} has its own training stages and does not support a Trainer: choose a method that only "
            f"averages ({', '.join(name for name in method_names() if get_method(name).takes_trainer)})"
        )
    if Part.CLASSIFIER in plan.network.starts_on_devices and plan.params.get("server_momentum"):
        raise NetworkError(
            "server_momentum needs initial weights on the coordinator, but only the program has them: leave it out"
        )
    check_backbones(plan, method.payload.up | method.payload.down)
    sealed = sealed_parts(plan, method)
    clear = method.payload.up - sealed or not sealed
    counts = () if method.needs.label_counts is LabelCounts.NEVER else (ReportField.LABEL_COUNTS,)
    optional = method.needs.label_counts is LabelCounts.OPTIONAL and not params.needs_label_counts
    planned = {name: getattr(plan, name) for name in FederationSpec.model_fields if name in FederationPlan.model_fields}
    own = {
        "params": params.model_dump(mode="json"),
        "upload": tuple(sorted(on_wire(method.payload.up, sealed))),
        "report": (*(one for one in _REPORT if clear or one is not ReportField.EXAMPLES), *counts),
        "optional_report": counts if optional else (),
        "layouts": wire_layouts(plan, method, sealed),
        "with_base": tuple(sorted(method.payload.with_base - sealed)) if is_delta(plan.codec) else (),
        "sealed": tuple(sorted(sealed)),
        "sealed_range": plan.sealed_range if sealed else None,
        "alternates": method.payload.alternates,
    }
    return FederationSpec.model_validate(planned | own)


def shadow_spec(spec: FederationSpec) -> FederationSpec:
    """The spec of the local-only model: method `local` with the same training parameters, data form and networks.

    Only for use together with `spec` on the same device: the federation name, and so every stream, is the same.
    """
    params = {name: value for name, value in spec.params.items() if name in TrainingParams.model_fields}
    parts = get_method("local").payload.parts
    return spec.model_copy(
        update={
            "method": "local",
            "params": params,
            "upload": (),
            "report": _REPORT,
            "optional_report": (),
            "sealed": (),
            "sealed_range": None,
            "alternates": False,
            "layouts": {part: layout for part, layout in spec.layouts.items() if part in parts},
        }
    )
