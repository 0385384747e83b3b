"""A spec with three small parts, and its updates and aggregates."""

from typing import Any

import numpy as np

from fedcg.learning.spec import FederationSpec, ImageForm, NetworkChoice
from fedcg.wire.artifacts.artifacts import ArtifactHeader, pack
from fedcg.wire.artifacts.payload import Array
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.parts import Part, PartLayouts, Report, ReportField, TensorLayout

FEDERATION = "tiny"
LAYOUTS: dict[Part, tuple[TensorLayout, ...]] = {
    Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(40, 50)),),
    Part.GENERATOR: (
        TensorLayout(name="count", dtype="int64", shape=()),
        TensorLayout(name="weight", dtype="float32", shape=(3, 4)),
    ),
    Part.EXTRACTOR: (TensorLayout(name="weight", dtype="float32", shape=(7,)),),
}


def tiny_spec(rounds: int = 2) -> FederationSpec:
    return FederationSpec(
        federation=FEDERATION,
        classes=("x", "y", "z"),
        input=ImageForm(mode="L", height=8, width=8, mean=(0.5,), std=(0.5,)),
        network=NetworkChoice(),
        method="fedcg",
        params={"server_iterations": 4},
        rounds=rounds,
        seed=1,
        upload=(Part.CLASSIFIER, Part.GENERATOR),
        report=(ReportField.EXAMPLES, ReportField.ACCURACY),
        layouts=LAYOUTS,
    )


def shared_layouts(spec: FederationSpec) -> PartLayouts:
    return {part: spec.layouts[part] for part in spec.upload}


def random_parts(layouts: PartLayouts, seed: int, scale: float = 0.1) -> dict[Part, dict[str, Array]]:
    """Deterministic small weights; buffers of integers stay 0, "var" buffers positive."""
    generator = np.random.default_rng(seed)
    return {
        part: {
            layout.name: np.zeros(layout.shape, np.int64)
            if layout.dtype == "int64"
            else np.abs(generator.normal(0, scale, layout.shape)).astype(np.float32)
            for layout in tensors
        }
        for part, tensors in layouts.items()
    }


def update_header(
    spec: FederationSpec, round_number: int, attempt: int, client: str, base: str, **changes: Any
) -> ArtifactHeader:
    values: dict[str, Any] = {
        "kind": "update",
        "method": spec.method,
        "federation": spec.federation,
        "round": round_number,
        "attempt": attempt,
        "client": client,
        "base": base,
        "report": Report(examples=10 + len(client), accuracy=0.5),
        "versions": {"torch": "2.13.0"},
        "determinism": {"cpu": "x86_64", "threads": "2"},
    }
    return ArtifactHeader(**{**values, **changes})


def aggregate_bytes(spec: FederationSpec, number: int, attempt: int, seed: int) -> bytes:
    about: dict[str, Any] = {"federation": spec.federation, "round": number, "attempt": attempt, "client": COORDINATOR}
    header = ArtifactHeader(kind="aggregate", method=spec.method, **about)
    return pack(header, random_parts(shared_layouts(spec), seed))
