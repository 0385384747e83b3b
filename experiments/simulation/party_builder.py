"""Builds the participants of a simulated run: images, the secrets of a demo with the same seed, and the wire's effect on numbers. Uses torch.

Updates and aggregates are packed and unpacked as in a deployment.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from experiments.data.client_datasets import Cohort, build_cohort
from experiments.data.source import Source
from experiments.errors import SourceError
from experiments.settings import FEDERATION, root_secret
from experiments.simulation.batch import RunSetting
from fedcg.learning.defences.defence import DefencePlace, defence_of
from fedcg.learning.errors import DataError
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import DivergedError, Weights
from fedcg.learning.networks.own_backbone import device_spec, with_features
from fedcg.learning.networks.plans import complete_spec
from fedcg.learning.registry import get_method
from fedcg.learning.seeds import Streams, spec_root
from fedcg.learning.simulation.party import ClientData, Party, Roots
from fedcg.learning.spec import FederationSpec, plan_from_mapping
from fedcg.learning.tensor_conversion import to_arrays, to_weights
from fedcg.values import Value
from fedcg.wire.artifacts.artifacts import ArtifactHeader, Base, codecs_for, pack, unpack
from fedcg.wire.errors import WireError
from fedcg.wire.messages.schemas import COORDINATOR
from fedcg.wire.parts import Part, UpdateCodec
from fedcg.wire.sealed_numbers import number_count


def simulated_party(run: RunSetting, source: Source) -> Party:
    """Return all participants of a run with a source's images, without a defence or frozen features.

    Raises:
        SourceError: as for `party_of`, or the images can't be partitioned.
    """
    spec = complete_spec(plan_from_mapping(run.plan(source)))
    return party_of(run, spec, build_cohort(source, spec.input, run.deal()))


def party_of(
    run: RunSetting, spec: FederationSpec, cohort: Cohort, trained_by: Mapping[str, FederationSpec] | None = None
) -> Party:
    """Return all participants of a run; `trained_by` has the specs of clients with their own trainers.

    Raises:
        SourceError: the method's server needs public images, but none were held out.
    """
    if cohort.public is None and get_method(spec.method).needs.public:
        raise SourceError(f"{spec.method} distils on unlabelled public images: hold some out with --public-images N")
    roots = roots_of(run.seed, tuple(sorted(cohort.clients)))
    if run.start == "public":  # as on devices without a cohort secret
        roots = replace(roots, cohort=spec_root(spec.seed))
    elif run.start == "random":
        roots = replace(roots, starts=roots.devices)
    # If clients' own test images are the common set, they are not tested on it again, but their average is tested on all.
    common, own = cohort.common if run.test == "proportional" else None, trained_by or own_specs(spec, cohort)
    coding = coding_of(spec)
    return Party(
        spec,
        cohort.clients,
        roots,
        common,
        run.device,
        cohort.public,
        coding,
        run.privacy,
        own,
        frozenset(cohort.clients) - frozenset(defenders_of(run, cohort)),
    )


def defenders_of(run: RunSetting, cohort: Cohort) -> list[str]:
    """Return the clients that have the run's defence and mechanisms."""
    return list(cohort.clients)[: run.defenders or None]


def own_specs(spec: FederationSpec, cohort: Cohort) -> dict[str, FederationSpec]:
    """Return, by client, the spec with its own backbone, from the spec's list in turn; empty if it lists no others."""
    if not spec.network.backbones:
        return {}
    names = itertools.cycle(spec.network.backbone_names)
    return {client: device_spec(spec, name) for client, name in zip(sorted(cohort.clients), names, strict=False)}


Facts = dict[str, dict[str, str]]
"""A defence's facts about each client."""


def defended(
    cohort: Cohort, run: RunSetting, roots: Roots, folder: Path, note: Callable[[str], None]
) -> tuple[Cohort, Facts]:
    """Return the cohort after the run's defence, with the devices' random streams, and the defence's facts.

    The defence applies to training images; other images only pass its input layer.

    Args:
        cohort: the real images.
        run: has the name and parameters of the defence.
        roots: the secrets of the clients, and the cohort's.
        folder: stores what was learned; another run of the same images resumes from there.
        note: receives a line for every tenth of a client's training, and the warnings.

    Raises:
        DataError: a client lacks the images that the defence needs; names the client.
        DefenceError: the defence refuses images or secrets.
        NetworkError: weights for the defence are not available.
        DivergedError: its training diverged.
    """
    assert run.defence is not None
    defence, params = defence_of(run.defence, run.defence_params)
    scope = (FEDERATION, "defence")
    together = None if run.start == "public" else Streams(roots.cohort).at(*scope)  # as without a cohort secret
    clients, facts = dict(cohort.clients), {}
    for name in defenders_of(run, cohort):
        data = cohort.clients[name]

        def tell(sentence: str, name: str = name) -> None:
            note(f"{name}: {sentence}")

        def progress(phase: str, step: int, steps: int, tell: Callable[[str], None] = tell) -> None:
            if step * 10 // steps > (step - 1) * 10 // steps:
                tell(f"{run.defence} {step}/{steps}")

        streams = Streams(roots.devices[name]).at(*scope)
        place = DefencePlace(streams, progress, folder / name, run.device, cohort=together, warn=tell)
        try:
            made = defence.apply(data.train, params, place)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
        made.keep_picture(folder / name)
        channels, height, width = data.train.images.shape[1:]
        make = defence.input_layer
        given = replace(data, input_layer=make(params, place, (channels, height, width)) if make else None)
        clients[name] = replace(given, train=made.images, val=given.seen(data.val), test=given.seen(data.test))
        facts[name] = dict(made.facts)
    return replace(cohort, clients=clients), facts


def featured(cohort: Cohort, spec: FederationSpec, device: str) -> Cohort:
    """Replace a cohort's images with a frozen backbone's features; unchanged if a client's images first pass a layer.

    Raises:
        NetworkError: the backbone's weights are missing.
    """
    if any(data.input_layer is not None for data in cohort.clients.values()):
        return cohort
    if own := own_specs(spec, cohort):
        each = {name: _featured_by(data, cohort.common, own[name], device) for name, data in cohort.clients.items()}
        return replace(cohort, clients=each)
    sets = [cohort.common, *(one for data in cohort.clients.values() for one in (data.train, data.val, data.test))]
    common, *others = with_features(spec, sets, device)
    rows = iter(others)
    clients = {name: ClientData(next(rows), next(rows), next(rows)) for name in cohort.clients}
    return replace(cohort, clients=clients, common=common)


def _featured_by(data: ClientData, common: ImageSet, spec: FederationSpec, device: str) -> ClientData:
    """Return a client's images, and the common ones, as features of that client's backbone."""
    train, val, test, shared = with_features(spec, [data.train, data.val, data.test, common], device)
    return ClientData(train, val, test, common=shared)


def roots_of(seed: int, clients: tuple[str, ...]) -> Roots:
    """Return the secrets that a demo with this seed writes into its processes' folders."""
    devices = {client: root_secret(seed, f"device {client}") for client in clients}
    return Roots(root_secret(seed, "cohort"), root_secret(seed, "coordinator"), devices)


_BASE = "0" * 64  # any aggregate: a simulation has no other


class WireCoding(Value):
    """The codecs of a spec, applied in memory."""

    spec: FederationSpec

    def aggregate(self, parts: Mapping[Part, Weights]) -> tuple[Mapping[Part, Weights], int]:
        """Return an aggregate as both sides have it, and the size of its artifact."""
        return self._through("aggregate", COORDINATOR, parts, self.spec.aggregate_codec, None)

    def update(
        self, client: str, parts: Mapping[Part, Weights], base: Mapping[Part, Weights]
    ) -> tuple[Mapping[Part, Weights], int]:
        """Return an update as the server decodes it, and the size of its artifact."""
        known = {part: base[part] for part in self.spec.with_base}
        known_base = Base(_BASE, to_arrays(known)) if known else None
        return self._through("update", client, parts, self.spec.codec, known_base)

    def _through(
        self,
        kind: Literal["update", "aggregate"],
        sender: str,
        parts: Mapping[Part, Weights],
        codec: UpdateCodec,
        base: Base | None,
    ) -> tuple[Mapping[Part, Weights], int]:
        """Sealed parts are returned unchanged: they travel as integers of four bytes."""
        spec = self.spec
        sealed = {part: parts[part] for part in spec.sealed if part in parts}
        clear = {part: weights for part, weights in parts.items() if part not in sealed}
        header = ArtifactHeader(
            kind=kind, method=spec.method, federation=spec.federation, round=1, attempt=1, client=sender, base=_BASE
        )
        layouts = {part: spec.layouts[part] for part in sorted(clear)}
        try:
            packed = pack(header, to_arrays(clear), codec, base)
            codecs = codecs_for(layouts, codec, frozenset() if base is None else frozenset(base.parts))
            decoded = unpack(packed, layouts, codecs=codecs, base=base).parts
        except WireError as error:
            raise DivergedError(f"the {kind} can't be encoded: {error}") from error
        found = {
            part: {name: tensor.to(parts[part][name].device) for name, tensor in weights.items()}
            for part, weights in to_weights(decoded).items()
        }
        return {**found, **sealed}, len(packed) + 4 * sum(number_count(spec.layouts[part]) for part in sealed)


def coding_of(spec: FederationSpec) -> WireCoding | None:
    """Return the wire's effect on the numbers of a federation; None if there is none."""
    return None if (spec.codec, spec.aggregate_codec) == ("f32", "f32") else WireCoding(spec)
