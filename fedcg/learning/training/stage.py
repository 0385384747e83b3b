"""A training stage is a value: networks, optimisers, batches and a pure step. `run_stage` runs every stage of every method.

A method defines only its specific parts. What all training needs is implemented here once: the order of batches is in
`batches`; with little memory a batch is divided into pieces;
DP-SGD replaces an optimiser; a CUDA graph replays a whole step; moving averages follow a step; checkpoints, progress
and divergence belong to the loop.

A moving average of a client's networks restarts in every round and is never sent. It is a further candidate for the
personal model.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import field
from itertools import pairwise
from typing import Protocol

import torch
from torch import nn

from fedcg.learning.errors import ExtensionError
from fedcg.learning.mechanisms.dp_sgd import PrivateSteps, private_steps
from fedcg.learning.method import RoundContext, TrainingParams, Weights, silent
from fedcg.learning.networks import weights_of
from fedcg.learning.networks.randomness import seeded_layers
from fedcg.learning.round_checkpoint import Kept, Restorable
from fedcg.learning.training.cuda_graph import graphed
from fedcg.learning.training.losses import LossMeter
from fedcg.learning.training.optimisers import add_gradient_noise
from fedcg.values import Value
from fedcg.wire.parts import Part

LOOKS = 20
"""How many times a watched loss is read while a stage runs."""

Tensors = tuple[torch.Tensor, ...]
LossOf = Callable[[], torch.Tensor]
Nets = Mapping[str, nn.Module]


class AfterStep(Protocol):
    """A callback after each step, with the updated networks."""

    def __call__(self) -> None:
        """Called after each step."""


class Descent(Value):
    """The loss that one optimiser minimises within a step: the sum of two losses, each computed on demand.

    Attributes:
        of: the optimiser, by its name in `Stage.trained`.
        rows: a mean over the batch of which row j depends only on row j of the batch. With DP-SGD the rows' gradients
            are clipped.
        rest: a loss that depends on no image. With DP-SGD its gradient is added after the noise.
    """

    of: str
    rows: LossOf | None = None
    rest: LossOf | None = None


Descents = Generator[Descent, torch.Tensor | None, Sequence[torch.Tensor] | None]
Step = Callable[[Nets, Tensors], Descents]
"""(networks by name, one batch's tensors) -> generator of descents. Each receives its loss (None for an
empty batch); the generator returns the losses that the stage reports, or None. It uses only tensors from its
arguments."""


class Trained(Value):
    """Some networks and the optimiser of their weights.

    Attributes:
        sees_images: whether its descents have losses of images, which DP-SGD clips; others depend on no image.
    """

    networks: tuple[str, ...]
    optimiser: torch.optim.Optimizer
    sees_images: bool = True


class Batches(Value):
    """The batches of a stage.

    Attributes:
        blocks: consecutive batches prepared together, tensors of [R, ...] each; they depend only on the round's
            streams.
        steps: total number of batches.
        size: rows of a batch; None: a block is one batch, whose tensors may have different numbers of rows (DP-SGD).
        expected_rows: with DP-SGD, the mean number of images in a batch.
        check_every: losses are checked after this many steps and after the last one; None: at the end of each block.
    """

    blocks: Iterable[Tensors]
    steps: int
    size: int | None
    expected_rows: float = 0.0
    check_every: int | None = None

    def cut(self, block: Tensors) -> list[slice]:
        """The batches of a block."""
        if self.size is None:
            return [slice(None)]
        rows = len(block[0])
        return [slice(start, min(start + self.size, rows)) for start in range(0, rows, self.size)]


class Stage(Value):
    """A training stage.

    Attributes:
        name: of its streams, checkpoint and progress; unique in a round.
        losses: the name of each loss that a step returns, for divergence errors.
        networks: all networks that its steps use, by name; trained ones are in train mode, others in eval mode.
        trained: optimisers by name.
        batches: its batches.
        step: see `Step`.
        kept: further state that its steps change, for checkpoints.
        after: called after each step; a stateful one that is not `Restorable` disables checkpoints for the stage.
        is_pure: whether a step branches on no value and draws only from torch's default generators. Others get no CUDA
            graph.
        until: (mean of the first loss since the last check, lowest mean before) -> whether the stage ends.
    """

    name: str
    losses: tuple[str, ...]
    networks: Mapping[str, nn.Module]
    trained: Mapping[str, Trained]
    batches: Batches
    step: Step
    kept: Mapping[str, Kept] = field(default_factory=dict)
    after: tuple[AfterStep, ...] = ()
    is_pure: bool = True
    until: Callable[[float, float], bool] = lambda mean, least: False

    def modules_of(self, name: str) -> list[nn.Module]:
        """The networks that an optimiser trains."""
        return [self.networks[network] for network in self.trained[name].networks]


def run_stage(stage: Stage, ctx: RoundContext) -> tuple[float, ...]:
    """Run a stage. Its networks are trained in place.

    Returns:
        The mean of each loss over the last block.

    Raises:
        DivergedError: a loss is not finite or exploded.
        ExtensionError: a step that is not such a generator, or uses an unknown optimiser.
    """
    in_training = {name for one in stage.trained.values() for name in one.networks}
    for name, network in stage.networks.items():
        network.train(name in in_training)
    meters = [LossMeter(what, ctx.device) for what in stage.losses]
    with seeded_layers(ctx, stage.name), closing(_Descending(stage, ctx)) as descending:
        _go_over(stage, ctx, meters, descending)
    return tuple(meter.latest for meter in meters)


def _go_over(stage: Stage, ctx: RoundContext, meters: Sequence[LossMeter], descending: _Descending) -> None:
    kept = descending.kept | {f"{what} loss": meter for what, meter in zip(stage.losses, meters, strict=True)}
    checkpoint = ctx.checkpoint
    for number, follow in enumerate(stage.after):
        if isinstance(follow, Restorable):
            kept[f"after {number}"] = follow
        else:  # its state would be lost
            checkpoint = None
    take, every, steps, done = descending.step(), stage.batches.check_every, stage.batches.steps, 0
    blocks: Iterable[tuple[Tensors, bool]] = ((block, True) for block in stage.batches.blocks)
    if checkpoint is not None:
        blocks = checkpoint.blocks(stage.name, kept, stage.batches.blocks, ctx.device)
    for block, is_new in blocks:
        batches = stage.batches.cut(block)
        if not is_new:
            done += len(batches)
            continue
        for rows in batches:
            losses = take(*(tensor[rows] for tensor in block))
            done += 1
            for meter, loss in zip(meters, losses, strict=bool(losses.numel())):
                meter.add(loss)
            for follow in stage.after:
                follow()
            is_due = rows is batches[-1] if every is None else done % every == 0 or done == steps
            if _told(stage, ctx, meters, done, is_due=is_due):
                return


def _told(stage: Stage, ctx: RoundContext, meters: Sequence[LossMeter], done: int, *, is_due: bool) -> bool:
    """Check the losses if due, report progress, and return whether the stage ends here."""
    steps, ends = stage.batches.steps, False
    if ctx.callbacks.watch_loss is not silent and (done % max(1, steps // LOOKS) == 0 or done == steps):
        ctx.callbacks.watch_loss(meters[0].look())
    if is_due:
        least = meters[0].least
        means = [meter.check() for meter in meters]
        ends = stage.until(means[0], least)
    ctx.callbacks.progress(stage.name, done, done if ends else steps)
    return ends


class _Descending:
    """Takes the steps of a stage in this round."""

    def __init__(self, stage: Stage, ctx: RoundContext) -> None:
        self._stage, self._ctx, self._around = stage, ctx, ExitStack()
        self._weights = {
            name: [
                weight for network in stage.modules_of(name) for weight in network.parameters() if weight.requires_grad
            ]
            for name in stage.trained
        }
        self._optimisers = {name: one.optimiser for name, one in stage.trained.items()}
        self._private: dict[str, PrivateSteps] = {}
        self._noise: dict[str, torch.Generator] = {}
        if (settings := ctx.privacy.dp_sgd) is None:
            for name in stage.trained if ctx.privacy.gradient_noise else ():
                purpose = (stage.name, name) if len(stage.trained) > 1 else (stage.name,)
                self._noise[name] = ctx.streams.generator(*purpose, "gradient noise")
            return
        for name, one in stage.trained.items():
            if one.sees_images:
                seed = ctx.streams.at("privacy").seed(stage.name, *((name,) if self._private else ()))
                rows = stage.batches.expected_rows
                steps = private_steps(stage.modules_of(name), one.optimiser, settings, rows, seed)
                self._private[name] = self._around.enter_context(steps)
                self._noise[name] = self._private[name].noise

    def close(self) -> None:
        """Restore the networks, except for their weights."""
        self._around.close()

    @property
    def kept(self) -> dict[str, Kept]:
        """All state that the steps change, for checkpoints."""
        optimisers: dict[str, Kept] = {name + " optimiser": one for name, one in self._optimisers.items()}
        noise: dict[str, Kept] = {name + " noise": stream for name, stream in self._noise.items()}
        trained: dict[str, Kept] = {
            network: self._stage.networks[network] for one in self._stage.trained.values() for network in one.networks
        }
        return {**trained, **optimisers, **noise, **self._stage.kept}

    def step(self) -> Callable[..., torch.Tensor]:
        """A step on a batch's tensors: the losses that it reports, [number of losses], or none."""
        stage, ctx = self._stage, self._ctx
        if self._private:
            return self._whole
        if not stage.is_pure:
            return self._in_pieces
        modules = [network for name in stage.trained for network in stage.modules_of(name)]
        return graphed(
            self._in_pieces, modules, list(self._optimisers.values()), stage.batches.steps if ctx.machine.graphs else 0
        )

    def _in_pieces(self, *batch: torch.Tensor) -> torch.Tensor:
        """Process a batch in pieces whose gradients add up to the batch's: the mean over rows is the size-weighted mean over pieces.

        Batch norm then uses pieces, and dropout draws for each.
        """
        size = len(batch[0])
        cut = pieces(size, self._ctx.machine.most_rows)
        if len(cut) == 1:
            return self._whole(*batch)
        shares = [(rows.stop - rows.start) / size for rows in cut]
        told = self._descend([tuple(tensor[rows] for tensor in batch) for rows in cut], shares)
        return torch.stack([share * losses for share, losses in zip(shares, told, strict=True)]).sum(0)

    def _whole(self, *batch: torch.Tensor) -> torch.Tensor:
        return self._descend([batch], [1.0])[0]

    def _descend(self, parts: Sequence[Tensors], shares: Sequence[float]) -> list[torch.Tensor]:
        """Take one step on a batch in parts. All parts run one optimiser's descent before the next."""
        steps = [self._stage.step(self._stage.networks, part) for part in parts]
        if not isinstance(steps[0], Generator):
            raise self._wrong("its step must yield a Descent")
        asked, told = self._next(steps, [None] * len(steps))
        while asked:
            name = asked[0].of
            if name not in self._optimisers:
                raise self._wrong(f"a Descent of {name!r}, but the optimisers are {', '.join(self._optimisers)}")
            private = self._private.get(name)
            if private is not None:
                answers = [_privately(private, asked[0], len(parts[0][0]))]
            else:
                self._optimisers[name].zero_grad()
                answers = [self._backward(one, share) for one, share in zip(asked, shares, strict=True)]
                if name in self._noise:
                    add_gradient_noise(self._optimisers[name], self._ctx.privacy.gradient_noise, self._noise[name])
                self._optimisers[name].step()
            asked, told = self._next(steps, answers)
        return told

    def _wrong(self, what: str) -> ExtensionError:
        return ExtensionError(f"stage {self._stage.name}: {what}")

    def _backward(self, descent: Descent, share: float) -> torch.Tensor:
        loss = _sum(descent)
        if loss.dim():
            raise self._wrong(f"the loss of {descent.of} has the shape {[*loss.shape]}; a Descent needs a scalar")
        (loss if share == 1.0 else loss * share).backward(inputs=self._weights[descent.of])
        return loss.detach()

    def _next(
        self, steps: Sequence[Descents], answers: Sequence[torch.Tensor | None]
    ) -> tuple[list[Descent], list[torch.Tensor]]:
        """The next descent of each part of a batch, or the losses that each returned at its end."""
        asked, told = [], []
        for step, answer in zip(steps, answers, strict=True):
            try:
                asked.append(step.send(answer))
            except StopIteration as end:  # noqa: PERF203 - the return of a generator
                losses, names = end.value, self._stage.losses
                if losses and (not isinstance(losses, list | tuple) or len(losses) != len(names)):
                    raise self._wrong(
                        f"its step must return a sequence of {len(names)} losses ({', '.join(names)})"
                    ) from None
                told.append(torch.stack([loss.detach() for loss in losses]) if losses else torch.empty(0))
        return asked, told


def _sum(descent: Descent) -> torch.Tensor:
    losses = [loss() for loss in (descent.rows, descent.rest) if loss is not None]
    return losses[0] if len(losses) == 1 else losses[0] + losses[1]


def _privately(private: PrivateSteps, descent: Descent, images: int) -> torch.Tensor | None:
    """A step of DP-SGD. Returns the sum of its losses, or None without losses."""
    found: list[torch.Tensor] = []

    def seen(loss_of: LossOf) -> LossOf:
        def run() -> torch.Tensor:
            loss = loss_of()
            found.append(loss.detach())
            return loss

        return run

    rows, rest = descent.rows, descent.rest
    private.step(images, rows and seen(rows), rest and seen(rest))
    return torch.stack(found).sum() if found else None


def pieces(rows: int, most_rows: int | None) -> list[slice]:
    """A batch divided into near-equal pieces of at most `most_rows` rows, each with two or more rows, as batch norm needs."""
    count = 1 if most_rows is None else min(math.ceil(rows / most_rows), max(1, rows // 2))
    edges = [rows * at // count for at in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


EXTRA = "ema_"
"""Prefix of a part's name in `ClientState.extras`."""


class MovingAverage:
    """θ̄ ← d θ̄ + (1 - d) θ after every step, with d = min(decay, (1 + t) / (10 + t)) at step t; buffers are copied.

    Args:
        nets: the networks at the start of the round, averaged while they are trained in place.
        decay: in (0, 1).

    Attributes:
        means: the averaged networks, by part.
    """

    def __init__(self, nets: Mapping[Part, nn.Module], decay: float) -> None:
        self._nets = dict(nets)
        self.means = {part: copy.deepcopy(net) for part, net in nets.items()}
        self._decay, self._steps = decay, torch.zeros((), dtype=torch.int64)

    @torch.no_grad()
    def __call__(self) -> None:
        """Called after each step."""
        self._steps += 1
        step = int(self._steps)
        kept = min(self._decay, (1 + step) / (10 + step))
        for part, net in self._nets.items():
            mean = self.means[part]
            for old, new in zip(mean.parameters(), net.parameters(), strict=True):
                old.lerp_(new, 1.0 - kept)
            for buffer, now in zip(mean.buffers(), net.buffers(), strict=True):
                buffer.copy_(now)

    def kept(self) -> dict[str, torch.Tensor]:
        """Its state for a checkpoint."""
        found = {
            f"{part.value}/{name}": tensor for part, weights in self._weights() for name, tensor in weights.items()
        }
        return {**found, "steps": self._steps}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Resume from a checkpoint."""
        self._steps = kept["steps"].clone()
        for part, net in self.means.items():
            net.load_state_dict({name: kept[f"{part.value}/{name}"] for name in net.state_dict()})

    def extras(self) -> dict[str, Weights]:
        """For `ClientState.extras`."""
        return {EXTRA + part.value: weights for part, weights in self._weights()}

    def _weights(self) -> list[tuple[Part, Weights]]:
        return [(part, weights_of(net)) for part, net in self.means.items()]


def moving_average(
    nets: Mapping[Part, nn.Module], params: TrainingParams, parts: Iterable[Part] = (Part.EXTRACTOR, Part.CLASSIFIER)
) -> tuple[MovingAverage, ...]:
    """The moving average of these parts, if the parameters ask for it; for `Stage.after`."""
    return (MovingAverage({part: nets[part] for part in parts}, params.ema),) if params.ema else ()


def average_extras(averages: Iterable[MovingAverage]) -> dict[str, Weights]:
    """For `ClientState.extras`."""
    return {name: weights for average in averages for name, weights in average.extras().items()}


def averaged_parts(extras: Mapping[str, Weights]) -> dict[Part, Weights] | None:
    """The averaged personal model among a client's extras; None without one."""
    found = {Part(name.removeprefix(EXTRA)): weights for name, weights in extras.items() if name.startswith(EXTRA)}
    return found or None
