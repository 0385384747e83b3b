"""What codecs cost and what they save: bytes, error and agreement of trained classifiers, for every codec and generator. Uses torch.

Clients train a few rounds on the embedded digits, uncoded. Their last updates are then packed with each codec, the deltas against the
aggregate that the last round started from, and unpacked as a coordinator does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal, get_args

import torch

from experiments.data.client_datasets import build_cohort
from experiments.simulation.batch import RunSetting
from experiments.simulation.party_builder import party_of
from experiments.simulation.wire_codec import WireCoding
from fedcg.learning.data.image_folder import normalise
from fedcg.learning.method import Aggregate, Weights
from fedcg.learning.networks import load_part
from fedcg.learning.networks.initial_weights import complete_spec
from fedcg.learning.simulation.party import Party
from fedcg.learning.simulation.simulation import simulated_rounds
from fedcg.learning.simulation.state import Schedule
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.training.training_loop import generate
from fedcg.wire.parts import AggregateCodec, Part, UpdateCodec

_DRAWS = 1000


@dataclass(frozen=True)
class Teachers:
    """What is trained, the same for every codec; two rounds at least, so that the last one starts from an aggregate."""

    clients: int = 3
    rounds: int = 3
    epochs: int = 3
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    """The last round of a federation.

    Attributes:
        spec: uncoded.
        base: the aggregate that the round started from.
        updates: the clients' shared parts after it; `extractors` their extractors.
        features: [N, ...] float32 per client, of held-out images by its own extractor.
        final: the aggregate that came out.
    """

    spec: FederationSpec
    base: Aggregate
    updates: Mapping[str, Mapping[Part, Weights]]
    features: Mapping[str, torch.Tensor]
    final: Aggregate


def train(teachers: Teachers, generator: str) -> Trained:
    """Train the federation with one generator."""
    setting = RunSetting(
        method="fedcg",
        clients=teachers.clients,
        rounds=teachers.rounds,
        local_epochs=teachers.epochs,
        seed=teachers.seed,
        generator=generator,
        quick=True,
    )
    source = setting.source()
    spec = complete_spec(plan_from_mapping(setting.plan(source)))
    party = party_of(setting, spec, build_cohort(source, spec.image, setting.deal()))
    steps = list(simulated_rounds(party, Schedule(shadow=False, evaluate_every=teachers.rounds)))
    before, last = steps[-2:]
    shared = last.aggregate.parts.keys()
    return Trained(
        spec=spec,
        base=before.aggregate,
        updates={name: {part: state.parts[part] for part in sorted(shared)} for name, state in last.states.items()},
        features={name: _features(party, name, state.parts) for name, state in last.states.items()},
        final=last.aggregate,
    )


@dataclass(frozen=True)
class Case:
    """What one codec came to.

    Attributes:
        of: update or aggregate.
        bytes: of the whole artifact, compressed; mean over clients.
        max_error: largest difference of a number and the decoded one.
        features: held-out ones; `agreement` is the share of them to which the decoded classifier gives the original's class.
        agreement_generated: the same of features that the decoded generator makes, and the original makes of the same draws.
    """

    generator: str
    of: Literal["update", "aggregate"]
    codec: UpdateCodec
    bytes: int
    max_error: float
    features: int
    agreement: float
    agreement_generated: float


def measure(trained: Trained) -> Iterator[Case]:
    """One case per codec of updates, then one per codec of aggregates."""
    for codec in get_args(UpdateCodec):
        coding = WireCoding(_coded(trained.spec, codec, "f32"))
        coded = [
            (parts, trained.features[client], *coding.update(client, parts, trained.base.parts))
            for client, parts in sorted(trained.updates.items())
        ]
        yield _case(trained.spec, "update", codec, coded)
    for aggregate_codec in get_args(AggregateCodec):
        decoded, size = WireCoding(_coded(trained.spec, "f32", aggregate_codec)).aggregate(trained.final.parts)
        features = torch.cat([rows for _, rows in sorted(trained.features.items())])
        yield _case(trained.spec, "aggregate", aggregate_codec, [(trained.final.parts, features, decoded, size)])


def cases(teachers: Teachers, generators: list[str], announce: Callable[[str], None]) -> list[Case]:
    """All cases of all generators, each generator trained once."""
    found: list[Case] = []
    for generator in generators:
        announce(f"{generator}: training {teachers.clients} clients for {teachers.rounds} rounds ...")
        found += measure(train(teachers, generator))
    return found


_Coded = tuple[Mapping[Part, Weights], torch.Tensor, Mapping[Part, Weights], int]
"""Parts, features to judge by, decoded parts, bytes."""


def _case(
    spec: FederationSpec, of: Literal["update", "aggregate"], codec: UpdateCodec, coded: Sequence[_Coded]
) -> Case:
    hits = torch.cat([_top1(spec, parts, rows) == _top1(spec, after, rows) for parts, rows, after, _ in coded])
    generated = torch.cat([_generated(spec, parts) == _generated(spec, after) for parts, _, after, _ in coded])
    return Case(
        generator=spec.network.generator,
        of=of,
        codec=codec,
        bytes=round(mean(size for _, _, _, size in coded)),
        max_error=max(_largest_error(parts, after) for parts, _, after, _ in coded),
        features=len(hits),
        agreement=float(hits.double().mean()),
        agreement_generated=float(generated.double().mean()),
    )


def _coded(spec: FederationSpec, codec: UpdateCodec, aggregate_codec: AggregateCodec) -> FederationSpec:
    """The spec as `complete_spec` would have made it with these codecs."""
    plan = {name: value for name, value in spec.model_dump(mode="json").items() if name in _PLANNED}
    return complete_spec(plan_from_mapping({**plan, "codec": codec, "aggregate_codec": aggregate_codec}))


_PLANNED = ("federation", "classes", "image", "network", "method", "params", "rounds", "seed")


@torch.no_grad()
def _features(party: Party, client: str, parts: Mapping[Part, Weights]) -> torch.Tensor:
    extractor = load_part(party.spec, Part.EXTRACTOR, parts[Part.EXTRACTOR]).eval()
    held_out = [party.datasets[client].test, *([] if party.common is None else [party.common])]
    features: torch.Tensor = extractor(normalise(torch.cat([images.images for images in held_out]), party.spec.image))
    return features


@torch.no_grad()
def _top1(spec: FederationSpec, parts: Mapping[Part, Weights], features: torch.Tensor) -> torch.Tensor:
    classes: torch.Tensor = load_part(spec, Part.CLASSIFIER, parts[Part.CLASSIFIER]).eval()(features).argmax(1)
    return classes


@torch.no_grad()
def _generated(spec: FederationSpec, parts: Mapping[Part, Weights]) -> torch.Tensor:
    """Top-1 of the classifier on the features of its own generator, for draws that are always the same."""
    labels = torch.arange(_DRAWS) % spec.class_count
    noise = torch.randn(_DRAWS, spec.network.noise_dim, generator=torch.Generator().manual_seed(0))
    source = load_part(spec, Part.GENERATOR, parts[Part.GENERATOR]).eval()
    return _top1(spec, parts, generate(source, noise, labels))


def _largest_error(before: Mapping[Part, Weights], after: Mapping[Part, Weights]) -> float:
    return max(
        float((tensor.double() - after[part][name].double()).abs().max())
        for part, weights in before.items()
        for name, tensor in weights.items()
        if tensor.numel()
    )
