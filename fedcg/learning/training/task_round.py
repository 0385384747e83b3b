"""The local round of a user's own task (`networks.task`), instead of the built-in stages."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fedcg.errors import told
from fedcg.learning.errors import ProgramError
from fedcg.learning.method import (
    Aggregate,
    ClientState,
    Evaluation,
    LocalResult,
    Parts,
    RoundContext,
    SharedResult,
    TrainingParams,
)
from fedcg.learning.networks.randomness import seeded_layers
from fedcg.learning.networks.task import Held, Task, TrainerContext
from fedcg.learning.spec import FederationSpec
from fedcg.wire.parts import Part, Report

PHASE = "train"


def task_of(spec: FederationSpec) -> Task | None:
    """The user's task that this process has bound to a spec; None if the spec uses the built-in stages."""
    task = spec.network.task
    return task if isinstance(task, Task) else None


def task_round(
    task: Task,
    shared: frozenset[Part],
    params: TrainingParams,
    state: ClientState,
    aggregate: Aggregate | None,
    ctx: RoundContext,
) -> LocalResult:
    """Load the aggregate over the client's parts, train with its trainer, keep all parts, share some.

    Raises:
        ProgramError: private tensors would be shared, or the trainer raises or changes the set of tensors.
    """
    trainer = task.trainer
    if trainer.private and Part.EXTRACTOR in shared:
        raise ProgramError(
            f"client {task.name}: method {ctx.spec.method} shares all tensors, but Trainer.private lists some: choose fedsplit"
        )
    if not trainer.private and shared == {Part.CLASSIFIER}:
        raise ProgramError(
            f"client {task.name}: Trainer.private is empty, but method {ctx.spec.method} needs a private part: choose fedavg"
        )
    model = task.model({**state.parts, **(aggregate.parts if aggregate else {})}, ctx.device)
    start = {name: one.detach().clone() for name, one in model.named_parameters()}

    def progress(done: int, count: int) -> None:
        ctx.callbacks.progress(PHASE, done, count)

    mu: float = getattr(params, "mu", 0.0)
    context = TrainerContext(ctx.round, params.epochs, params.batch_size, params.lr, ctx.device, progress, mu, start)
    try:
        with seeded_layers(ctx, "task"), torch.enable_grad(), _signs_of_life(progress):
            returned = copy.copy(trainer).train(model.train(), context)
    except Exception as error:
        raise ProgramError(f"client {task.name}: Trainer.train failed in round {ctx.round}: {told(error)}") from error
    parts = task.parts(model)
    _check_same(task, state.parts, parts)
    if returned is not None or all(torch.equal(one, start[name].cpu()) for name, one in _all(parts) if name in start):
        raise ProgramError(
            f"client {task.name}: Trainer.train must train the given model in place and return nothing; in round {ctx.round} it returned a "
            f"{type(returned).__name__}, or changed no parameter"
        )
    report = Report(examples=len(task.held()[0]), loss=None)
    return LocalResult(
        SharedResult(copy.deepcopy({part: parts[part] for part in sorted(shared)})), ClientState(parts), report
    )


def task_evaluation(spec: FederationSpec, parts: Parts, data: Held, device: str) -> Evaluation:
    """The trainer's metric as the accuracy, and 1 minus it as the loss."""
    task = task_of(spec)
    assert task is not None  # the task holds the data
    found = task.figure(task.model(parts, device), data.kind)
    return Evaluation(found, 1.0 - found, len(data), (), ())


@contextmanager
def _signs_of_life(progress: Callable[[int, int], None]) -> Iterator[None]:
    """Report every optimiser step within the block."""
    steps = 0

    def after(*_: object) -> None:
        nonlocal steps
        steps += 1
        progress(steps, steps)

    hook = register_optimizer_step_post_hook(after)
    try:
        yield
    finally:
        hook.remove()


def _all(parts: Parts) -> Iterator[tuple[str, torch.Tensor]]:
    return (item for weights in parts.values() for item in weights.items())


def _check_same(task: Task, before: Parts, after: Parts) -> None:
    """Raise if training has added, removed or reshaped tensors."""
    for part, weights in before.items():
        forms = {name: tuple(one.shape) for name, one in weights.items()}
        now = {name: tuple(one.shape) for name, one in after.get(part, {}).items()}
        if wrong := sorted(forms.items() ^ now.items()):
            name = wrong[0][0]
            raise ProgramError(
                f"client {task.name}: after Trainer.train {name} is {now.get(name, 'missing')} but was {forms.get(name, 'missing')} before: keep names and shapes"
            )
