"""Bytes per update against accuracy, for runs that differ in generator and codecs alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.papers.lines import Figure, figure_of
from experiments.papers.records import RunRecord
from experiments.simulation.batch import RunSetting

# What a choice of generator and codecs changes, and what does not distinguish runs.
_FREE = frozenset(
    {"generator", "discriminator", "noise_dim", "codec", "aggregate_codec", "seed", "paper", "threads", "device"}
)


_Choice = tuple[int, str, int, str, str]


@dataclass(frozen=True)
class Traffic:
    """One generator with one pair of codecs in one setting.

    Attributes:
        setting: what the compared runs share: the preset where they have one, else data and partition.
        codec: of updates; `aggregate_codec` of aggregates.
        up: bytes of the coded tensors that a client sends in a round.
        artifact: bytes of the whole update, compressed, mean over seeds; None where it was not coded.
        accuracy: accuracy_personal over seeds, in percent; `last` is that of the last round.
    """

    setting: str
    method: str
    variant: str
    generator: str
    noise_dim: int
    codec: str
    aggregate_codec: str
    up: int
    artifact: int | None
    accuracy: Figure | None
    last: Figure | None


def traffic(runs: Iterable[RunRecord]) -> tuple[tuple[Traffic, ...], ...]:
    """Groups of two or more generators or codecs in one setting, each from the fewest bytes to the most."""
    groups: dict[str, dict[_Choice, list[RunRecord]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        codecs = (_setting(run, "codec"), _setting(run, "aggregate_codec"))
        choice = (run.bytes_shared.up, run.network.generator, run.network.noise_dim, *codecs)
        groups[_shared_setting(run)][choice].append(run)
    return tuple(
        tuple(_traffic(found[choice]) for choice in sorted(found))
        for _, found in sorted(groups.items())
        if len({(generator, *codecs) for _, generator, _, *codecs in found}) > 1
    )


def _setting(run: RunRecord, name: str) -> str:
    return str({**RunSetting().published(), **run.setting}[name])


def _shared_setting(run: RunRecord) -> str:
    whole = {**RunSetting().published(), **run.setting}  # what a record does not name had its default
    setting = {name: value for name, value in whole.items() if name not in _FREE}
    reduced = {name: pair for name, pair in run.reduced.items() if name not in _FREE}
    return json.dumps([run.base, run.method, run.variant, setting, run.params, reduced], sort_keys=True, default=list)


def _traffic(runs: list[RunRecord]) -> Traffic:
    one = runs[0]
    named = one.base or f"{one.data}, {one.partition}"
    sizes = [size for run in runs if (size := run.bytes_shared.up_artifact) is not None]
    personal, last = (
        figure_of(value for run in runs if (value := run.figure(name)) is not None)
        for name in ("accuracy_personal", "accuracy_last")
    )
    return Traffic(
        setting=f"{named}, {one.network.split}, {one.rounds} rounds, {len(one.clients)} clients",
        method=one.method,
        variant=one.variant,
        generator=one.network.generator,
        noise_dim=one.network.noise_dim,
        codec=_setting(one, "codec"),
        aggregate_codec=_setting(one, "aggregate_codec"),
        up=one.bytes_shared.up,
        artifact=round(sum(sizes) / len(sizes)) if sizes else None,
        accuracy=personal,
        last=last,
    )
