"""Every place where the author of a method could hide a private part, over every codec: it is refused on the device, or an
independent decoder finds nothing of it in the bytes. And what types cannot catch, which the audit finds."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import nn

from audit.recording.leakage import Match, PrivateTensor, compare, find_bytes, wire_tensors
from edge_client.config import PolicySection
from edge_client.errors import FirewallError
from edge_client.firewall import UpdateFacts, build_update
from fedcg.learning.spec import FederationSpec
from fedcg.learning.tensor_conversion import to_arrays
from fedcg.wire.artifacts.artifacts import Base, artifact_id, unpack
from fedcg.wire.artifacts.inspection import inspect
from fedcg.wire.parts import Part, Report, ReportField, TensorLayout, UpdateCodec
from tests.support.edge.world import DEVICE, aggregate_of, toy_spec

CODECS: tuple[UpdateCodec, ...] = get_args(UpdateCodec)
SHAPE = (20, 16)  # of the generator's weight, and of the extractor's: nothing but the firewall's rules tells them apart
WEIGHT = TensorLayout(name="weight", dtype="float32", shape=SHAPE)
LAYOUTS = {
    Part.CLASSIFIER: (TensorLayout(name="weight", dtype="float32", shape=(3, 16)),),
    Part.GENERATOR: (TensorLayout(name="count", dtype="int64", shape=()), WEIGHT),
    Part.EXTRACTOR: (WEIGHT,),
}
SHARED = (Part.CLASSIFIER, Part.GENERATOR)
POLICY = PolicySection(allow_report=frozenset({ReportField.EXAMPLES, ReportField.LABEL_COUNTS}))


class LoudTensor(torch.Tensor):
    """A tensor that carries more than its numbers."""


class LoudReport(Report):
    """A report with one field more."""

    note: str = ""


@dataclass
class Attempt:
    """What a method hands over, and what it must not."""

    parts: dict[Any, dict[str, Any]]
    extractor: torch.Tensor
    moment: torch.Tensor  # of the extractor's optimiser
    report: Report = Report(examples=12, label_counts=(4, 4, 4))  # noqa: RUF009 - frozen
    versions: dict[str, str] = field(default_factory=lambda: {"torch": "2.13.0", "fedcg-edge": "0.1.0"})
    determinism: dict[str, str] = field(default_factory=lambda: {"threads": "1", "device": "cpu"})

    @property
    def generator(self) -> dict[str, Any]:
        return self.parts[Part.GENERATOR]

    @property
    def secret_text(self) -> str:
        return self.extractor.numpy().tobytes().hex()[:120]


def attempt() -> Attempt:
    random = torch.Generator().manual_seed(3)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    parts = {
        Part.CLASSIFIER: {"weight": drawn(3, 16)},
        Part.GENERATOR: {"count": torch.tensor(5), "weight": drawn(*SHAPE)},
    }
    return Attempt(parts, drawn(*SHAPE), drawn(*SHAPE))


Hide = Callable[[Attempt], object]


def in_a_module(attempt: Attempt, **inside: nn.Module) -> nn.Module:
    module = nn.Module()
    module.weight = nn.Parameter(attempt.generator["weight"])
    module.register_buffer("count", attempt.generator["count"])
    for name, inner in inside.items():
        module.add_module(name, inner)
    return module


def linear(weight: torch.Tensor) -> nn.Module:
    module = nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    module.weight.data = weight
    return module


def nested_module(attempt: Attempt) -> None:
    attempt.parts[Part.GENERATOR] = in_a_module(attempt, body=linear(attempt.extractor)).state_dict()


def buffer(attempt: Attempt) -> None:
    module = in_a_module(attempt)
    module.register_buffer("running_mean", attempt.extractor)
    attempt.parts[Part.GENERATOR] = module.state_dict()


def in_an_attribute(attempt: Attempt) -> None:
    attempt.generator["weight"] = attempt.generator["weight"].as_subclass(LoudTensor)
    attempt.generator["weight"].secret = attempt.extractor


def counts(attempt: Attempt) -> tuple[int, ...]:
    return tuple(int(word) for word in attempt.extractor.numpy().view(np.uint32).ravel())


REFUSED: dict[str, tuple[Hide, str]] = {
    "a tensor more": (lambda a: a.generator.update(body=a.extractor), "generator/body"),
    "a tensor of a nested module": (nested_module, "generator/body.weight"),
    "a nested module itself": (lambda a: a.generator.update(body=linear(a.extractor)), "Linear"),
    "a nested mapping": (lambda a: a.generator.update(body={"weight": a.extractor}), "dict"),
    "a buffer": (buffer, "generator/running_mean"),
    "an optimiser's state": (lambda a: a.generator.update(exp_avg=a.moment), "generator/exp_avg"),
    "another shape under a known name": (
        lambda a: a.parts[Part.CLASSIFIER].update(weight=a.extractor),
        "classifier/weight",
    ),
    "a shape that only adds up": (lambda a: a.generator.update(weight=a.extractor.T), "shape"),
    "rows behind the last one": (
        lambda a: a.generator.update(weight=torch.cat([a.generator["weight"], a.extractor])),
        "shape",
    ),
    "the low bits of doubles": (
        lambda a: a.generator.update(weight=a.generator["weight"].double() + a.extractor.double() * 1e-9),
        "float64",
    ),
    "the imaginary part": (
        lambda a: a.generator.update(weight=torch.complex(a.generator["weight"], a.extractor)),
        "complex64",
    ),
    "a counter with many digits": (
        lambda a: a.generator.update(count=a.extractor.view(torch.int32).long()),
        "generator/count",
    ),
    "not a number, with a payload": (
        lambda a: a.generator.update(weight=(a.extractor.view(torch.int32) | 0x7F800001).view(torch.float32)),
        "NaN",
    ),
    "a tensor's attribute": (in_an_attribute, "LoudTensor"),
    "the part itself": (lambda a: a.parts.update({Part.EXTRACTOR: {"weight": a.extractor}}), "extractor"),
    "the part as text": (lambda a: a.parts.update({"extractor": {"weight": a.extractor}}), "extractor"),
    "the other private part": (lambda a: a.parts.update({Part.DISCRIMINATOR: {"weight": a.moment}}), "discriminator"),
    "a part of another name": (lambda a: a.parts.update({"stem": {"weight": a.extractor}}), "stem"),
    "a header field": (lambda a: a.versions.update(notes=a.secret_text), "notes"),
    "a version": (lambda a: a.versions.update(torch=a.secret_text), "torch"),
    "a fact of the box": (lambda a: a.determinism.update(threads=a.secret_text), "threads"),
    "a report field": (
        lambda a: setattr(a, "report", LoudReport(examples=12, label_counts=(4, 4, 4), note=a.secret_text)),
        "LoudReport",
    ),
    "a report that nobody checked": (
        lambda a: setattr(a, "report", Report.model_construct(examples=a.secret_text, label_counts=(4, 4, 4))),  # type: ignore[arg-type]
        "examples",
    ),
    "label counts": (
        lambda a: setattr(a, "report", Report(examples=sum(counts(a)), label_counts=counts(a))),
        "label_counts",
    ),
    "label counts of as many classes": (
        lambda a: setattr(a, "report", Report(examples=12, label_counts=counts(a)[:3])),
        "label_counts",
    ),
}


def aliased_storage(attempt: Attempt) -> None:
    memory = torch.cat([attempt.generator["weight"].ravel(), attempt.extractor.ravel()])
    attempt.generator["weight"] = memory[: SHAPE[0] * SHAPE[1]].view(SHAPE)


def aliased_by_strides(attempt: Attempt) -> None:
    attempt.generator["weight"] = torch.stack([attempt.generator["weight"], attempt.extractor], dim=2)[:, :, 0]


def a_gradient(attempt: Attempt) -> None:
    parameter = nn.Parameter(attempt.generator["weight"])
    parameter.grad = attempt.extractor
    attempt.generator["weight"] = parameter


def an_attribute_of_the_report(attempt: Attempt) -> None:
    object.__setattr__(attempt.report, "note", attempt.secret_text)


LEFT_BEHIND: dict[str, Hide] = {
    "aliased storage": aliased_storage,
    "aliased by strides": aliased_by_strides,
    "a gradient": a_gradient,
    "an attribute of the report": an_attribute_of_the_report,
    "a report field that nobody asked for": lambda a: setattr(
        a, "report", a.report.model_copy(update={"loss": float(a.extractor[0, 0].abs())})
    ),
}


def spec_for(codec: UpdateCodec) -> FederationSpec:
    spec = toy_spec(upload=SHARED, report=(ReportField.EXAMPLES, ReportField.LABEL_COUNTS), layouts=LAYOUTS)
    return spec.model_copy(update={"codec": codec, "with_base": SHARED if codec.endswith("-delta") else ()})


def base_bytes(spec: FederationSpec) -> bytes:
    """The aggregate that the round started from: near the update, as in training."""
    moved = {
        part: {name: value + np.float32(0.01) if value.dtype == np.float32 else value for name, value in arrays.items()}
        for part, arrays in to_arrays(attempt().parts).items()
    }
    return aggregate_of(moved, spec, 2)


def leave(trying: Attempt, codec: UpdateCodec) -> tuple[bytes, bytes]:
    """The update as the training process makes it from what a method returned, and its base."""
    spec = spec_for(codec)
    base = base_bytes(spec)
    facts = UpdateFacts(DEVICE, 3, 2, trying.versions, trying.determinism)
    known = Base(artifact_id(base), unpack(base, {part: LAYOUTS[part] for part in SHARED}).parts)
    return build_update(to_arrays(trying.parts), trying.report, spec=spec, policy=POLICY, facts=facts, base=known), base


def leaks(update: bytes, base: bytes, trying: Attempt) -> list[Match]:
    """What the audit finds of the private tensors, as numbers and as bytes."""
    seen = {artifact_id(data): inspect(data) for data in (update, base)}
    truth = [
        PrivateTensor(DEVICE, "extractor/weight", trying.extractor.numpy()),
        PrivateTensor(DEVICE, "optimiser/exp_avg", trying.moment.numpy()),
    ]
    payloads = {"update": update, "decompressed": inspect(update).payload}
    return compare(wire_tensors(seen), truth) + find_bytes(payloads, truth)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("place", REFUSED)
def test_a_private_part_in_a_place_of_its_own_is_refused_by_name(place: str, codec: UpdateCodec) -> None:
    hide, named = REFUSED[place]
    trying = attempt()
    hide(trying)
    with pytest.raises((FirewallError, TypeError)) as caught:
        leave(trying, codec)
    assert named in str(caught.value)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("place", [*LEFT_BEHIND, "nothing"])
def test_a_private_part_behind_what_leaves_stays_behind(place: str, codec: UpdateCodec) -> None:
    trying = attempt()
    LEFT_BEHIND.get(place, id)(trying)
    update, base = leave(trying, codec)
    assert leaks(update, base, trying) == []
    assert trying.secret_text[:16] not in json.dumps(inspect(update).header)
    assert inspect(update).report_fields == {"examples", "label_counts"}
    plain, _ = leave(attempt(), codec)
    assert update == plain  # whatever was tried left no trace at all


@pytest.mark.parametrize("codec", CODECS)
def test_what_types_can_not_catch_the_audit_finds(codec: UpdateCodec) -> None:
    """The extractor in the generator's place: name, element type and shape are right, and only the numbers are not."""
    trying = attempt()
    trying.generator["weight"] = trying.extractor
    update, base = leave(trying, codec)
    assert {match.private for match in leaks(update, base, trying)} == {"extractor/weight"}
