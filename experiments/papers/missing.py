"""Which runs of the published tables are missing at published settings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from experiments.papers.catalogue import Preset, presets
from experiments.papers.plan import printed_runs
from experiments.papers.records import RunRecord

_LOCAL = "local"


@dataclass(frozen=True)
class Missing:
    """Seeds of one row, with one set of searched values, that have no run at published settings."""

    paper: str
    method: str
    variant: str
    seeds: tuple[int, ...]


def missing_runs(runs: Iterable[RunRecord], chosen: Sequence[Preset] | None = None) -> tuple[Missing, ...]:
    """What is missing, in the order of the papers; the shadows of FedCG's runs count as its runs of `local`.

    Args:
        runs: records of all kinds.
        chosen: only what these presets need, for a stand-in all its rows; None: every published figure.
    """
    done: set[tuple[str, str, str, int]] = set()
    for run in runs:
        if run.base is not None and not run.reduced:
            done.add((run.base, run.method, run.variant, run.seed))
            # FedCG's table needs of `local` what every run's shadow gives; FedMD-CG's needs a global accuracy too.
            if run.base.startswith("fedcg:") and run.figure("accuracy_local") is not None:
                done.add((run.base, _LOCAL, "", run.seed))
    published = (preset for preset in presets().values() if preset.stand_in is None)
    seeds: dict[tuple[str, str, str], list[int]] = {}
    for plan in printed_runs(published if chosen is None else chosen):
        if (plan.paper, plan.method, plan.variant, plan.seed) not in done:
            seeds.setdefault((plan.paper, plan.method, plan.variant), []).append(plan.seed)
    return tuple(Missing(*key, tuple(numbers)) for key, numbers in seeds.items())
