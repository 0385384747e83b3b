"""How long the stages of a FedCG round take, by the plain reference and by what we run, in one go and in turn.

Every stage is timed in a spawned process with as many threads as its setting says. The reference has one process for all
clients, as the authors' code; ours trains clients in several one-thread processes at once, and is timed with all of them busy.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum

import torch

from experiments.bench.learning import reference_fedcg as reference
from fedcg.learning.aggregation.distillation import (
    Distillation,
    Ensemble,
    Pair,
    draw_bank,
    teacher_logits,
    train_student,
    uniform,
)
from fedcg.learning.image_set import ImageSet
from fedcg.learning.method import RoundContext
from fedcg.learning.methods import fedcg
from fedcg.learning.networks import NETWORKS, Networks, load_part
from fedcg.learning.networks.plans import complete_spec, initial_parts
from fedcg.learning.seeds import Streams
from fedcg.learning.spec import FederationPlan, ImageForm, NetworkChoice
from fedcg.learning.training.batches import FeatureSource
from fedcg.learning.training.classification import train_classifier
from fedcg.learning.training.losses import kl_teacher_student
from fedcg.learning.training.stage import Nets, Tensors, run_stage
from fedcg.worker_process import spawning

_CLASSES = tuple("abcdefghij")
_COLOUR = ImageForm(mode="RGB", height=32, width=32, mean=(0.5,) * 3, std=(0.25,) * 3)
_WARM_UP_STEPS = 5
_LATE_ROUND = 30  # the feature loss has its full weight


class Stage(str, Enum):
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
def workers(processes: int, threads: int) -> Iterator[Callable[[Setting, Stage], float]]:
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


def timed(setting: Setting, stage: Stage) -> float:
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
        image=_COLOUR,
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


def work_of(setting: Setting, stage: Stage, steps: int) -> Callable[[], object]:
    """What one call of a stage does, ready to run."""
    ctx = context_of(setting, steps)
    initial = initial_parts(ctx.spec, b"bench")
    nets = Networks(**{part.value: load_part(ctx.spec, part, initial[part], ctx.device) for part in NETWORKS})
    if stage in {Stage.TEACHER, Stage.STUDENT}:
        return _server_work(nets, stage, setting, steps, ctx)
    data, params = random_images(setting.images).to(ctx.device), fedcg.FedcgParams.model_validate(ctx.spec.params)
    if setting.plain:
        twins = reference.plain_networks(nets)
        train = reference.classify if stage is Stage.CLASSIFY else reference.train_gan
        return lambda: train(twins, data, params, ctx)
    if stage is Stage.FEATURES:
        return lambda: FeatureSource(nets.extractor, data, ctx.spec)
    if stage is Stage.CLASSIFY:
        penalty = fedcg.feature_penalty(nets.generator, fedcg.gamma(ctx.round, params), ctx)
        return lambda: train_classifier(nets.extractor, nets.classifier, data, params, ctx, penalty)
    source = FeatureSource(nets.extractor, data, ctx.spec)
    return lambda: run_stage(fedcg.adversarial(nets.generator, nets.discriminator, source, params, ctx), ctx)


def _server_work(nets: Networks, stage: Stage, setting: Setting, steps: int, ctx: RoundContext) -> Callable[[], object]:
    settings = Distillation(steps, setting.batch, 3e-4, 1e-4)
    bank = draw_bank(ctx.streams, settings.rows, setting.network.noise_dim, uniform(len(_CLASSES)))
    student = Pair(nets.generator, nets.classifier)
    if setting.plain:
        plain = [
            Pair(*(reference.plain(net) for net in (student.generator, student.classifier)))
            for _ in range(setting.teachers + 1)
        ]
        taught = [(1 / setting.teachers, one) for one in plain[1:]]
        return lambda: reference.distil(plain[0], taught, bank, settings)
    ensemble = Ensemble()
    ensemble.add(1, teacher_logits(student, bank, ctx))
    if stage is Stage.TEACHER:
        return lambda: ensemble.add(1, teacher_logits(student, bank, ctx))
    target = ensemble.logits().to(ctx.device)

    def loss_of(nets: Nets, features: torch.Tensor, logits: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
        return kl_teacher_student(taught, logits)

    def beside(rows: slice) -> Tensors:
        return (target[rows],)

    return lambda: train_student(student, bank, settings, ctx, loss_of, beside)
