"""A whole FedCG round against the plain reference: seconds of every stage, by both, in one go and in turn, and what they add up to.

The reference has one process for all clients; ours trains clients in several one-thread processes, and is timed with all of them
busy.
"""

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

import torch

from experiments.bench import reference_fedcg as reference
from fedcg.child_python import spawning
from fedcg.learning.aggregation import distillation
from fedcg.learning.aggregation.averaging import ExactSum
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.methods import fedcg
from fedcg.learning.networks import NETWORKS, load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import kl_teacher_student
from fedcg.learning.training.stage import Nets, Tensors, run_stage

_CLASSES = tuple("abcdefghij")
_COLOUR = ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
_WARM_UP_STEPS = 5
_LATE_ROUND = 30  # the feature loss has its full weight


class TimedStage(str, Enum):
    """What is timed at a time."""

    CLASSIFY = "classify"
    FEATURES = "features"
    GAN = "gan"
    TEACHER = "teacher"
    STUDENT = "student"


@dataclass(frozen=True)
class Setting:
    """One way to train.

    Attributes:
        plain: by the reference.
        network: split, generator, discriminator, noise.
        passes: "joint" or "separate", the discriminator's passes for real and generated rows.
        batch: rows of a step, on clients and server.
        images: of a client, 3x32x32.
        steps: of a client's stage, and of the student.
        teachers: how many the reference runs in every step of the student.
    """

    plain: bool
    network: NetworkChoice
    passes: str
    batch: int
    images: int
    steps: int
    teachers: int


@contextmanager
def workers(processes: int, threads: int) -> Iterator[Callable[[Setting, TimedStage], float]]:
    """Spawned processes of a fixed number of threads for the length of a block; gives a function that times a stage.

    Its result is the time of the slowest of all processes, each doing the stage once at the same time.
    """
    with ExitStack() as stack:
        pools = [
            stack.enter_context(
                ProcessPoolExecutor(1, spawning(), initializer=torch.set_num_threads, initargs=(threads,))
            )
            for _ in range(processes)
        ]
        yield lambda setting, stage: max(one.result() for one in [pool.submit(timed, setting, stage) for pool in pools])


def timed(setting: Setting, stage: TimedStage) -> float:
    """Seconds of one stage on fresh networks, after a few steps that are not timed."""
    work_of(setting, stage, _WARM_UP_STEPS)()
    work = work_of(setting, stage, setting.steps)
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def median_seconds(jobs: Sequence[Callable[[], float]], repeats: int) -> list[float]:
    """Medians of some measurements, taken in turn: other load on the machine hits all alike."""
    taken = [[job() for job in jobs] for _ in range(repeats)]
    return [statistics.median(column) for column in zip(*taken, strict=True)]


def context_of(setting: Setting, steps: int) -> RoundContext:
    """A late round of a federation with this setting."""
    plan = FederationPlan(
        federation="bench",
        classes=_CLASSES,
        input=_COLOUR,
        network=setting.network,
        method="fedcg",
        params={"steps": steps, "batch_size": setting.batch, "discriminator_passes": setting.passes},
        rounds=100,
        augment_flip=True,
    )
    streams = Streams(b"bench").at("bench", _LATE_ROUND, 1)
    return RoundContext(complete_spec(plan), _LATE_ROUND, 1, streams)


def random_images(count: int) -> ImageSet:
    """Random pixels: no stage's time depends on what they show."""
    stream = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 3, 32, 32), generator=stream, dtype=torch.uint8)
    return ImageSet(images, torch.randint(0, len(_CLASSES), (count,), generator=stream), _CLASSES)


def work_of(setting: Setting, stage: TimedStage, steps: int) -> Callable[[], object]:
    """What one call of a stage does, ready to run."""
    ctx = context_of(setting, steps)
    initial = initial_parts(ctx.spec, b"bench")
    nets = {part: load_part(ctx.spec, part, initial[part], ctx.device) for part in NETWORKS}
    if stage in {TimedStage.TEACHER, TimedStage.STUDENT}:
        return _server_work({part: nets[part] for part in distillation.SHARED}, stage, setting, steps, ctx)
    data, params = random_images(setting.images).to(ctx.device), fedcg.FedcgParams.model_validate(ctx.spec.params)
    if setting.plain:
        twins = reference.plain_networks(nets)
        train = reference.classify if stage is TimedStage.CLASSIFY else reference.train_gan
        return lambda: train(twins, data, params, ctx)
    extractor, classifier, generator, discriminator = (nets[part] for part in NETWORKS)
    if stage is TimedStage.FEATURES:
        return lambda: FeatureSource(extractor, data, ctx.spec)
    if stage is TimedStage.CLASSIFY:
        penalty = fedcg.feature_penalty(generator, fedcg.gamma(ctx.round, params), ctx)
        return lambda: train_classifier(extractor, classifier, data, params, ctx, penalty)
    source = FeatureSource(extractor, data, ctx.spec)
    return lambda: run_stage(fedcg.adversarial(generator, discriminator, source, params, ctx), ctx)


def _server_work(
    student: distillation.Pair, stage: TimedStage, setting: Setting, steps: int, ctx: RoundContext
) -> Callable[[], object]:
    settings = distillation.Distillation(steps, setting.batch, 3e-4, 1e-4)
    bank = distillation.draw_bank(
        ctx.streams, settings.rows, setting.network.noise_dim, distillation.uniform(len(_CLASSES))
    )
    if setting.plain:
        plain = [reference.plain_networks(student) for _ in range(setting.teachers + 1)]
        taught = [(1 / setting.teachers, one) for one in plain[1:]]
        return lambda: reference.distil(plain[0], taught, bank, settings)
    ensemble = ExactSum()
    ensemble.add(distillation.teacher_logits(student, bank, ctx))
    if stage is TimedStage.TEACHER:
        return lambda: ensemble.add(distillation.teacher_logits(student, bank, ctx))
    target = ensemble.value().to(ctx.device, torch.float32)

    def loss_of(nets: Nets, features: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        return kl_teacher_student(taught, logits)

    def beside(rows: slice) -> Tensors:
        return (target[rows],)

    return lambda: distillation.train_student(student, bank, settings, ctx, loss_of, beside)


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


def measure(plan: RoundPlan, announce: Callable[[str], None]) -> dict[str, object]:
    """Run every stage of the reference and of each variant in turn.

    Args:
        plan: what to run.
        announce: called with a line of progress before every measurement.

    Returns:
        Seconds and ratios by stage; `reference_seconds`, and one entry and one `speedup_…` per variant.
    """
    with workers(1, plan.threads) as serial, workers(plan.processes, 1) as parallel:
        names: list[tuple[str, TimedStage]] = []
        jobs: list[Callable[[], float]] = []
        for name, setting in {"reference": _reference(plan), **_ours(plan)}.items():
            for stage in _stages(setting):
                run = serial if setting.plain or stage in {TimedStage.TEACHER, TimedStage.STUDENT} else parallel
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


def _stages(setting: Setting) -> tuple[TimedStage, ...]:
    return (TimedStage.CLASSIFY, TimedStage.GAN, TimedStage.STUDENT) if setting.plain else tuple(TimedStage)


def _shortened(setting: Setting, stage: TimedStage, plan: RoundPlan) -> Setting:
    server = stage in {TimedStage.TEACHER, TimedStage.STUDENT}
    steps = plan.measured_iterations if server else plan.measured_epochs * math.ceil(plan.images / plan.batch)
    return replace(setting, steps=steps)


def whole_round(name: str, found: dict[tuple[str, TimedStage], float], plan: RoundPlan) -> dict[str, float]:
    """Seconds of a whole round's stages: all clients' classification and GAN, the server, and their sum."""
    turns = plan.clients if name == "reference" else math.ceil(plan.clients / plan.processes)
    epochs, iterations = plan.epochs / plan.measured_epochs, plan.server_iterations / plan.measured_iterations
    classify = turns * epochs * found[name, TimedStage.CLASSIFY]
    gan = turns * (epochs * found[name, TimedStage.GAN] + found.get((name, TimedStage.FEATURES), 0.0))
    teachers = plan.clients * found.get((name, TimedStage.TEACHER), 0.0)
    server = iterations * (found[name, TimedStage.STUDENT] + teachers)
    parts = {"classify": classify, "gan": gan, "server": server, "round": classify + gan + server}
    return {stage: round(seconds, 4) for stage, seconds in parts.items()}
