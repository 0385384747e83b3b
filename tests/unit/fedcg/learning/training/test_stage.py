"""What any training needs, each over a toy stage and over every stage of every method that is installed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedcg.learning.method import Callbacks, DivergedError, Machine, RoundContext
from fedcg.learning.networks.randomness import seeded_layers
from fedcg.learning.privacy import DpSgdSettings, PrivacySettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.round_checkpoint import RoundCheckpoint, Tensors
from fedcg.learning.training import cuda_graph
from fedcg.learning.training.optimisers import SGD, adam
from fedcg.learning.training.stage import Batches, Descent, Descents, Nets, Stage, Trained, pieces, run_stage
from tests.support.learning.learning_cases import context, quick_spec, same
from tests.support.learning.stages import CASES, VARIANTS, Caught, ReplayedStep, replays, stages_of
from tests.support.present import present

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
every_case = pytest.mark.parametrize("case", CASES)
CTX = context(quick_spec("local"))
TOY_STEPS, TOY_LOSSES = 8, ("task loss", "judge loss")


def toy_step(nets: Nets, batch: tuple[torch.Tensor, ...]) -> Descents:
    """One descent on a loss of rows and one on weights, then one of a judge."""
    shown, wanted = batch
    hidden = nets["body"](shown)
    lost = yield Descent(
        "task", lambda: (hidden - wanted).square().mean(), lambda: 0.1 * next(nets["body"].parameters()).square().sum()
    )
    judged = yield Descent("judge", rest=lambda: nets["judge"](hidden.detach()).square().mean())
    return present(lost), present(judged)


def toy(**changed: Any) -> Stage:
    """Two networks with dropout before them; batches of 8, 8, 8 and 2 rows, twice, in blocks of two, made as they are asked for."""
    stream = torch.Generator().manual_seed(0)
    shown, wanted = torch.randn(26, 3, generator=stream), torch.randn(26, 2, generator=stream)
    body, judge = nn.Linear(3, 2), nn.Sequential(nn.Dropout(0.2), nn.Linear(2, 1))
    with torch.no_grad():
        for weight in (*body.parameters(), *judge.parameters()):
            weight.copy_(torch.randn(weight.shape, generator=stream))
    trained = {
        "task": Trained(("body",), adam(body.parameters(), 0.05, 0.0)),
        "judge": Trained(("judge",), SGD(judge.parameters(), lr=0.1, momentum=0.9), sees_images=False),
    }
    blocks = ((shown[rows], wanted[rows]) for _ in range(2) for rows in (slice(0, 16), slice(16, 26)))
    networks = {"body": body, "judge": judge}
    stage = Stage("toy", TOY_LOSSES, networks, trained, Batches(blocks, TOY_STEPS, 8), toy_step)
    return replace(stage, **changed)


def outcome(stage: Stage, ctx: RoundContext = CTX) -> tuple[tuple[float, ...], Tensors]:
    """The losses of a stage and all that its networks hold after it."""
    losses = run_stage(stage, ctx)
    states = {f"{name}/{key}": one for name, net in stage.networks.items() for key, one in net.state_dict().items()}
    return losses, states


def same_outcome(one: tuple[tuple[float, ...], Tensors], other: tuple[tuple[float, ...], Tensors]) -> bool:
    return one[0] == other[0] and same(one[1], other[1])


# Batches in pieces, for want of memory.

NO_MEAN_OF_ROWS = {
    ("fedcg", "generate"): "mode seeking pairs rows of a batch, and half of its labels are asked for twice",
    ("fedgen", "distil"): "likewise",
    ("fedmd_cg", "generate"): "the diversity term compares all rows of a batch",
}


def is_mean_of_rows(one: Caught) -> bool:
    """Whether a step in pieces has the same maths; batch norm in train mode sees a piece alone."""
    trained = [module for name in one.stage.trained for net in one.stage.modules_of(name) for module in net.modules()]
    mixing = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in trained)
    return not mixing and (one.ctx.spec.method, one.stage.name) not in NO_MEAN_OF_ROWS


@given(rows=st.integers(1, 300), most=st.integers(2, 300))
def test_pieces_cover_the_batch_once_none_is_too_large_and_none_is_one_row_alone(rows: int, most: int) -> None:
    cut = pieces(rows, most)
    assert [index for one in cut for index in range(one.start, one.stop)] == list(range(rows))
    sizes = [one.stop - one.start for one in cut]
    assert rows == 1 or min(sizes) >= 2
    assert max(sizes) <= max(most, 3)  # three rows can't be cut into two and one
    assert max(sizes) - min(sizes) <= 1


def toy_without_dropout() -> Stage:
    stage = toy()
    stage.networks["judge"].get_submodule("0").p = 0.0  # type: ignore[assignment]
    return stage


class HeldActivations:
    """Bytes that autograd keeps for a backward pass, but for weights: now, and at most so far."""

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        self.now, self.most, self._weights = 0, 0, {weight.data_ptr() for weight in weights}

    def keep(self, tensor: torch.Tensor) -> Held:
        return Held(self, tensor, 0 if tensor.data_ptr() in self._weights else tensor.nbytes)


class Held:
    def __init__(self, within: HeldActivations, tensor: torch.Tensor, size: int) -> None:
        self.within, self.tensor, self.size = within, tensor, size
        within.now += size
        within.most = max(within.most, within.now)

    def __del__(self) -> None:
        self.within.now -= self.size


def activations(stage: Stage, ctx: RoundContext) -> int:
    """The bytes that a stage keeps for backward passes at most."""
    held = HeldActivations(weight for net in stage.networks.values() for weight in net.parameters())
    with torch.autograd.graph.saved_tensors_hooks(held.keep, lambda one: one.tensor):
        run_stage(stage, ctx)
    return held.most


@every_case
def test_a_stage_in_pieces_keeps_fewer_activations_and_takes_the_same_steps(case: str) -> None:
    for one in stages_of(case):
        share = 0.8 if one.stage.is_pure else 0.95  # frozen teachers are kept whole
        few = replace(one.ctx, machine=replace(one.ctx.machine, most_rows=3))
        assert activations(one.again(), few) < share * activations(one.again(), one.ctx), one.stage.name
        if is_mean_of_rows(one):
            (losses, states), (cut_losses, cut_states) = outcome(one.again(), one.ctx), outcome(one.again(), few)
            assert cut_losses == pytest.approx(losses, rel=1e-4, abs=1e-6), one.stage.name
            for name, tensor in states.items():
                torch.testing.assert_close(cut_states[name], tensor, rtol=1e-3, atol=1e-4, msg=f"{case}: {name}")


# Checkpoints.


def checkpoint(saved: Tensors, save: Callable[[Tensors], None] = lambda state: None) -> RoundCheckpoint:
    """One at the end of each block."""
    return RoundCheckpoint(save, saved, 0.0, clock=map(float, count()).__next__)


def kept_states(stage: Stage) -> list[Tensors]:
    """What a stage keeps at the end of each of its blocks."""
    kept: list[Tensors] = []
    run_stage(stage, replace(CTX, checkpoint=checkpoint({}, kept.append)))
    return kept


def assert_goes_on_after_any_block(make: Callable[[], Stage], ctx: RoundContext, blocks: int, what: str) -> None:
    """Against the stage that goes through, and keeps its state on the way."""
    kept: list[Tensors] = []
    undisturbed = outcome(make(), replace(ctx, checkpoint=checkpoint({}, kept.append)))
    assert len(kept) == blocks, what
    for block, saved in enumerate(kept, 1):
        assert same_outcome(undisturbed, outcome(make(), replace(ctx, checkpoint=checkpoint(saved)))), (what, block)


@pytest.mark.parametrize("ending", [{}, {"until": lambda mean, least: mean > 0.97 * least}])
def test_a_toy_killed_after_any_block_goes_on_to_the_same_bits(ending: dict[str, Any]) -> None:
    blocks = 2 if ending else 4  # the third block, whose mean is not much below the least one, is the last
    assert_goes_on_after_any_block(lambda: toy(**ending), CTX, blocks, "toy")
    saved = kept_states(toy(**ending))[1]
    seen: list[int] = []
    ctx = replace(CTX, checkpoint=checkpoint(saved), callbacks=Callbacks(lambda phase, step, steps: seen.append(step)))
    assert same_outcome(outcome(toy(**ending)), outcome(toy(**ending), ctx))
    assert seen == ([5, 6] if ending else [5, 6, 7, 8])


@every_case
def test_a_stage_killed_after_any_block_goes_on_to_the_same_bits(case: str) -> None:
    for one in stages_of(case):
        blocks = list(one.stage.batches.blocks)
        assert_goes_on_after_any_block(one.again, one.ctx, len(blocks), f"{one.stage.name} of {case}")


# What follows a step.


class Followed:
    """Notes the weights after each step."""

    def __init__(self, stage: Stage) -> None:
        self._nets = [net for name in stage.trained for net in stage.modules_of(name)]
        self.seen: list[torch.Tensor] = []

    def __call__(self) -> None:
        weights = [weight.detach().flatten() for net in self._nets for weight in net.parameters()]
        self.seen.append(torch.cat(weights).clone())


@every_case
def test_what_is_called_after_each_step_finds_the_weights_as_it_left_them(case: str) -> None:
    for one in stages_of(case):
        stage = one.again()
        follower = Followed(stage)
        follower()
        run_stage(replace(stage, after=(follower,)), one.ctx)
        assert len(follower.seen) == 1 + stage.batches.steps, one.stage.name
        assert not any(torch.equal(earlier, later) for earlier, later in pairwise(follower.seen)), one.stage.name


def test_a_stage_that_something_follows_whose_state_would_be_lost_has_no_checkpoints() -> None:
    assert kept_states(toy(after=(lambda: None,))) == []


# DP-SGD: one weight, 0 at first, whose row (x, t) has the loss (w x - t)², and 3 w beside it.

CLIP, EXPECTED = 0.5, 4.0


def one_weight(blocks: Sequence[torch.Tensor], noise: float = 0.0, slope: float = 3.0) -> tuple[float, list[float]]:
    """The weight after SGD at rate 1 on targets at x = 1, in batches of which 4 rows are expected, and the losses that were told."""
    line, told = nn.Linear(1, 1, bias=False), list[float]()
    nn.init.zeros_(line.weight)

    def step(nets: Nets, batch: tuple[torch.Tensor, ...]) -> Descents:
        (targets,) = batch
        loss = yield Descent(
            "line",
            lambda: (nets["line"](torch.ones_like(targets)) - targets).square().mean(),
            (lambda: slope * next(nets["line"].parameters()).sum()) if slope else None,
        )
        told.extend([] if loss is None else [float(loss)])
        return None if loss is None else (loss,)

    trained = {"line": Trained(("line",), SGD(line.parameters(), lr=1.0))}
    batches = Batches([(block.view(-1, 1),) for block in blocks], len(blocks), None, EXPECTED, len(blocks))
    settings = DpSgdSettings.model_construct(noise_multiplier=noise, clip=CLIP)
    ctx = replace(CTX, privacy=PrivacySettings.model_construct(dp_sgd=settings))
    run_stage(Stage("private", ("line loss",), {"line": line}, trained, batches, step), ctx)
    assert not hasattr(line.weight, "grad_sample")  # nothing of Opacus is left
    return line.weight.item(), told


def test_no_row_counts_for_more_than_the_clip_and_what_sees_no_row_is_added_unclipped() -> None:
    # Gradients 2 (w x - t) x: of t = -0.05, 0.1; of t = -100, 200, clipped to 0.5. (0.1 + 0.5) / 4 = 0.15, and 3 beside them.
    weight, told = one_weight([torch.tensor([-0.05, -100.0])])
    assert weight == pytest.approx(-0.15 - 3.0)
    assert told == [pytest.approx((0.05**2 + 100.0**2) / 2)]
    further, _ = one_weight([torch.tensor([-0.05, -50.0])])
    assert further == pytest.approx(weight)


def test_an_empty_batch_is_a_step_of_noise_and_of_what_sees_no_row() -> None:
    nothing = torch.zeros(0)
    assert one_weight([nothing]) == (-3.0, [0.0])  # the loss 3 w at w = 0
    assert one_weight([nothing], slope=0.0) == (0.0, [])  # and without it, nothing is told
    noise, _ = one_weight([nothing], noise=1.0, slope=0.0)
    assert abs(noise) > 1e-3
    both, _ = one_weight([nothing], noise=1.0)
    assert both == pytest.approx(noise - 3.0)  # the same noise: the rest is added after it
    assert one_weight([nothing, nothing], noise=1.0, slope=0.0)[0] != noise


@pytest.mark.parametrize("name", [name for name in method_names() if get_method(name).private_stages])
def test_a_method_that_dp_sgd_covers_has_as_many_stages_that_see_images_as_it_says(name: str) -> None:
    seeing = [one for caught in stages_of(name) for one in caught.stage.trained.values() if one.sees_images]
    assert len(seeing) == get_method(name).private_stages


# A CUDA graph's behaviour, on the CPU, and graphs on a CUDA device.


def test_a_toy_replayed_trains_as_the_plain_one_does_and_one_that_wants_no_graphs_gets_none() -> None:
    plain = outcome(toy_without_dropout())
    with replays():
        assert same_outcome(plain, outcome(toy_without_dropout()))
        assert (ReplayedStep.made, ReplayedStep.eager) == (1, 2)  # the last batch of each epoch is smaller
        outcome(toy_without_dropout(), replace(CTX, machine=Machine(graphs=False)))
        outcome(toy(is_pure=False))
        assert ReplayedStep.made == 1


@every_case
def test_a_stage_replayed_trains_as_the_plain_one_does(case: str) -> None:
    for one in stages_of(case):
        plain = outcome(one.again(), one.ctx)
        sizes = [len(block[0][rows]) for block in one.stage.batches.blocks for rows in one.stage.batches.cut(block)]
        with replays():
            assert same_outcome(plain, outcome(one.again(), one.ctx)), one.stage.name
            assert ReplayedStep.made == one.stage.is_pure
            assert ReplayedStep.eager == one.stage.is_pure * sum(size != sizes[0] for size in sizes)


@needs_cuda
@every_case
def test_a_stage_under_a_graph_is_the_stage_without_it(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "LEAST_STEPS", 1)
    for one in stages_of(case, "cuda"):
        losses, states = outcome(one.again(), replace(one.ctx, machine=replace(one.ctx.machine, graphs=False)))
        graphed_losses, graphed_states = outcome(one.again(), one.ctx)
        assert graphed_losses == pytest.approx(losses, abs=1e-3)
        for name, tensor in states.items():
            assert torch.allclose(tensor.float(), graphed_states[name].float(), atol=1e-3), (one.stage.name, name)


# Progress and divergence.


def test_a_toy_reports_every_step_the_mean_of_its_last_block_and_what_is_watched() -> None:
    told: list[tuple[str, object]] = []
    ctx = replace(
        CTX,
        callbacks=Callbacks(
            lambda phase, step, steps: told.append((phase, (step, steps))), lambda loss: told.append(("watched", loss))
        ),
    )
    stage, every = toy_without_dropout(), list[float]()

    def noted(nets: Nets, batch: tuple[torch.Tensor, ...]) -> Descents:
        losses = yield from toy_step(nets, batch)
        every.append(float(present(losses)[0]))
        return losses

    losses = run_stage(replace(stage, step=noted), ctx)
    assert [one for name, one in told if name == "toy"] == [(step, TOY_STEPS) for step in range(1, TOY_STEPS + 1)]
    # 8 steps, of which 20 may be watched
    assert [one for name, one in told if name == "watched"] == pytest.approx(every)
    assert [name for name, _ in told[:2]] == ["watched", "toy"]
    assert losses[0] == pytest.approx(sum(every[-2:]) / 2)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("value", [math.nan, 1e9])
def test_a_toy_whose_loss_is_lost_ends_and_names_the_loss(at: int, value: float) -> None:
    def lost(nets: Nets, batch: tuple[torch.Tensor, ...]) -> Descents:
        losses = yield from toy_step(nets, batch)
        return tuple(loss * value if at == number else loss for number, loss in enumerate(losses or ()))

    with pytest.raises(DivergedError, match=f"{TOY_LOSSES[at]}: mean loss .* is kept"):
        run_stage(toy(step=lost), CTX)


@every_case
def test_a_stage_reports_every_step_and_one_with_a_weight_that_is_no_number_ends(case: str) -> None:
    for one in stages_of(case):
        seen: list[tuple[str, int, int]] = []
        stage = one.again()
        run_stage(stage, replace(one.ctx, callbacks=Callbacks(lambda *told, seen=seen: seen.append(told))))
        steps = stage.batches.steps
        assert seen == [(stage.name, step, steps) for step in range(1, steps + 1)], one.stage.name
        stage = one.again()
        with torch.no_grad():
            for name in stage.trained:
                next(stage.modules_of(name)[0].parameters()).fill_(math.nan)
        with pytest.raises(DivergedError) as caught:
            run_stage(stage, one.ctx)
        assert str(caught.value).startswith(tuple(f"{loss}: mean loss nan" for loss in stage.losses)), one.stage.name


# Shapes and devices: a step on torch's device "meta", which has no numbers, as near to a GPU as a machine without one comes.

CROSSED = {"fedmd_cg", "fedmd_cg as in its code", "fedcg of mlp"}
"""Their students can't run there: which teachers count in a batch, and on which rows, is looked up on the host by the batch's place in the bank."""


class OnMetaAlone(TorchDispatchMode):
    """Refuses every operation with a tensor on another device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs, result)):
            if isinstance(one, torch.Tensor) and not one.is_meta:
                raise RuntimeError(f"{func} with a tensor on {one.device}")
        return result


def step_on_meta(stage: Stage) -> list[torch.Tensor]:
    """One step without the optimisers; the losses that it tells."""
    for network in stage.networks.values():
        network.to("meta")
    block = next(iter(stage.batches.blocks))
    batch = tuple(tensor[stage.batches.cut(block)[0]].to("meta") for tensor in block)
    steps, answer = stage.step(stage.networks, batch), None
    with OnMetaAlone() if stage.is_pure else nullcontext():
        try:
            while True:
                descent = steps.send(answer)
                losses = [loss() for loss in (descent.rows, descent.rest) if loss is not None]
                assert all(loss.is_meta and loss.shape == () for loss in losses)
                weights = [weight for network in stage.modules_of(descent.of) for weight in network.parameters()]
                sum(losses[1:], losses[0]).backward(inputs=weights)
                assert any(weight.grad is not None for weight in weights)
                answer = losses[0].detach()
        except StopIteration as end:
            return list(end.value)


@pytest.mark.parametrize("case", [*method_names(), *VARIANTS])
def test_a_step_runs_on_the_device_meta(case: str) -> None:
    for one in stages_of(case):
        if one.stage.name == "distil" and case in CROSSED:
            assert not one.stage.is_pure
            continue
        with seeded_layers(one.ctx, one.stage.name):
            told = step_on_meta(one.again())
        assert [(loss.is_meta, loss.shape) for loss in told] == [(True, ())] * len(one.stage.losses)
