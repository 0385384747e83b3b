"""A whole FedCG round against the plain reference: seconds of every stage, and what they add up to."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from experiments.bench.learning.training import Setting, Stage, median_seconds, workers
from fedcg.learning.spec import NetworkChoice

_PUBLISHED = NetworkChoice(split="lenet5", generator="conv", discriminator="conv_published", noise_dim=100)
# Ours, by the key of its speed-up in the record. Only the first does the reference's maths.
VARIANTS: dict[str, tuple[NetworkChoice, str]] = {
    "equal_maths": (_PUBLISHED, "separate"),
    "joint_pass": (_PUBLISHED.model_copy(update={"discriminator": "conv"}), "joint"),
    "compact": (_PUBLISHED.model_copy(update={"generator": "mlp", "discriminator": "mlp", "noise_dim": 64}), "joint"),
}
DIFFERENCES = {
    "equal_maths": "same networks, draws, losses and weights as the reference",
    "joint_pass": "another discriminator (label by projection, no batch norm), one pass for real and generated rows",
    "compact": "another model: MLP generator and discriminator, 64-dimensional noise",
}


@dataclass(frozen=True)
class RoundPlan:
    """The round that is reported, and how much of it is run.

    Attributes:
        clients: all with `images` images.
        images: per client, 3x32x32.
        batch: rows of a step.
        epochs: of classification, and again of the GAN.
        server_iterations: steps of the student.
        processes: in which ours trains clients at the same time, with one thread each.
        threads: of the reference, and of our server.
        measured_epochs: run of `epochs`; the rest is extrapolated.
        measured_iterations: run of `server_iterations`.
        repeats: of every measurement; the median counts.
    """

    clients: int = 4
    images: int = 2000
    batch: int = 16
    epochs: int = 20
    server_iterations: int = 2000
    processes: int = 2
    threads: int = 2
    measured_epochs: int = 1
    measured_iterations: int = 200
    repeats: int = 3

    @property
    def is_extrapolated(self) -> bool:
        """Whether less than the whole round is run."""
        return (self.measured_epochs, self.measured_iterations) != (self.epochs, self.server_iterations)


def measure(plan: RoundPlan, announce: Callable[[str], None]) -> dict[str, object]:
    """Run every stage of the reference and of each variant in turn.

    Args:
        plan: what to run.
        announce: called with a line of progress before every measurement.

    Returns:
        Seconds and ratios by stage; `reference_seconds`, and one entry and one `speedup_…` per variant.
    """
    with workers(1, plan.threads) as serial, workers(plan.processes, 1) as parallel:
        names: list[tuple[str, Stage]] = []
        jobs: list[Callable[[], float]] = []
        for name, setting in {"reference": _reference(plan), **_ours(plan)}.items():
            for stage in _stages(setting):
                run = serial if setting.plain or stage in {Stage.TEACHER, Stage.STUDENT} else parallel
                part = _shortened(setting, stage, plan)
                names.append((name, stage))
                jobs.append(_announced(partial(run, part, stage), f"{name}: {stage.value}", announce))
        found = dict(zip(names, median_seconds(jobs, plan.repeats), strict=True))
    whole = {name: whole_round(name, found, plan) for name in ("reference", *VARIANTS)}
    result: dict[str, object] = {"reference_seconds": whole["reference"]}
    for name in VARIANTS:
        speedups = {stage: round(whole["reference"][stage] / whole[name][stage], 3) for stage in whole[name]}
        result[name] = {"what": DIFFERENCES[name], "seconds": whole[name], "speedup": speedups}
        result[f"speedup_{name}"] = speedups["round"]
    return result


def _announced(job: Callable[[], float], line: str, announce: Callable[[str], None]) -> Callable[[], float]:
    def run() -> float:
        announce(line)
        return job()

    return run


def _reference(plan: RoundPlan) -> Setting:
    return Setting(True, _PUBLISHED, "separate", plan.batch, plan.images, 0, plan.clients)  # noqa: FBT003 - `plain`


def _ours(plan: RoundPlan) -> dict[str, Setting]:
    common = replace(_reference(plan), plain=False)
    return {name: replace(common, network=network, passes=passes) for name, (network, passes) in VARIANTS.items()}


def _stages(setting: Setting) -> tuple[Stage, ...]:
    return (Stage.CLASSIFY, Stage.GAN, Stage.STUDENT) if setting.plain else tuple(Stage)


def _shortened(setting: Setting, stage: Stage, plan: RoundPlan) -> Setting:
    server = stage in {Stage.TEACHER, Stage.STUDENT}
    steps = plan.measured_iterations if server else plan.measured_epochs * math.ceil(plan.images / plan.batch)
    return replace(setting, steps=steps)


def whole_round(name: str, found: dict[tuple[str, Stage], float], plan: RoundPlan) -> dict[str, float]:
    """Seconds of a whole round's stages: all clients' classification and GAN, the server, and their sum."""
    turns = plan.clients if name == "reference" else math.ceil(plan.clients / plan.processes)
    epochs, iterations = plan.epochs / plan.measured_epochs, plan.server_iterations / plan.measured_iterations
    classify = turns * epochs * found[name, Stage.CLASSIFY]
    gan = turns * (epochs * found[name, Stage.GAN] + found.get((name, Stage.FEATURES), 0.0))
    teachers = plan.clients * found.get((name, Stage.TEACHER), 0.0)
    server = iterations * (found[name, Stage.STUDENT] + teachers)
    parts = {"classify": classify, "gan": gan, "server": server, "round": classify + gan + server}
    return {stage: round(seconds, 4) for stage, seconds in parts.items()}
