"""DP-SGD (Abadi et al., 2016) with Opacus, and the (ε, δ) that a client has spent across rounds.

Batches are Poisson-sampled, per-image gradients are clipped, and their sum gets Gaussian noise.

What (ε, δ) covers: the weights that a client sends, against anyone who has all of its updates, for adding or removing
one training image. Every network that sees images and feeds what is sent is trained this way: extractor and classifier
with one clip over both, then FedCG's discriminator on the features of its real rows. The steps of both stages count,
because both use every image. A generator that learns only from such a discriminator, with labels drawn independently of
the data, is covered too (post-processing). So is everything that a server computes from the updates. Methods that train
another network on images or labels are refused (`Method.private_stages`).

It does not cover the numbers of a report (examples, label counts, loss, accuracy), the choice of the best round by
validation images (it decides what a device keeps and serves, not what it sends), whether a device participates, and the
personal model if anyone but the owner can query it: its weights are covered, its held-out metrics are not. A local-only
model is trained without DP-SGD and never sent. The number of training images counts as public, because it sets the
sampling rate and the number of steps. A subject in k images has up to k times the ε, at a larger δ.

Noise and sampling come from `torch.Generator`s seeded with 63 bits of the device's secret stream, so they can't be
reproduced without the secret. They are not cryptographic generators. Attacks on floating-point noise are not covered:
they need single noisy gradients, and only weights after many steps leave the device.

Accounting uses Opacus' Rényi DP of the subsampled Gaussian mechanism (Mironov et al., 2019).
"""

from __future__ import annotations

import functools
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from torch import nn

from fedcg.learning.errors import PrivacyError
from fedcg.learning.method import Method, TrainingParams
from fedcg.learning.networks.assembly import skeleton
from fedcg.learning.networks.randomness import lent_generators
from fedcg.learning.networks.timm_backbones import constant_layers
from fedcg.learning.privacy import DpSgdSettings
from fedcg.learning.registry import get_method, method_names
from fedcg.learning.spec import NetworkSpec
from fedcg.values import Value
from fedcg.wire.parts import Part

Loss = Callable[[], torch.Tensor]
_SETTINGS = {
    Part.EXTRACTOR: (
        "network.split",
        "lenet5, lenet5_relu, lenet5_wide, or a backbone with a projection and network.freeze = all",
    ),
    Part.CLASSIFIER: ("network.split", "lenet5, lenet5_relu or lenet5_wide"),
    Part.DISCRIMINATOR: ("network.discriminator", "mlp_plain or conv_plain"),
}


def check_dp_sgd(spec: NetworkSpec, method: Method) -> None:
    """Check that DP-SGD can train every network of the method that sees images.

    Raises:
        PrivacyError: Opacus is not installed, the method has a stage that DP-SGD can't cover, or a network has layers
            that mix rows or keep statistics of them.
    """
    if importlib.util.find_spec("opacus") is None:
        raise PrivacyError("dp_sgd needs Opacus: pip install 'fedcg-edge[privacy]'")
    if not method.private_stages:
        covered = [name for name in method_names() if get_method(name).private_stages]
        raise PrivacyError(
            f"dp_sgd can't cover {method.name}: it trains a network on images or labels without per-"
            f"image gradients (`private_stages`: docs/how-to/add-a-stage.md); choose one of {', '.join(covered)}"
        )
    for part in sorted(method.payload.private | method.payload.up):
        if part in _SETTINGS and (layer := _unfit_layer(spec, part)):
            setting, choices = _SETTINGS[part]
            name = spec.network.discriminator if part is Part.DISCRIMINATOR else spec.network.split
            raise PrivacyError(
                f"dp_sgd can't train the {part.value} of {setting} = {name}: {layer} has no per-image gradients; "
                f"choose {choices}"
            )


def _unfit_layer(spec: NetworkSpec, part: Part) -> str:
    """The type of the first layer that mixes rows or keeps state besides its weights; empty if there is none."""
    with lent_generators(0):
        network = skeleton(spec, part)
    constant = constant_layers(network)
    layers = [layer for layer in network.modules() if layer not in constant]
    mixing = (nn.modules.batchnorm._BatchNorm, nn.modules.batchnorm._LazyNormBase)  # noqa: SLF001 - no public name
    unfit = [
        layer for layer in layers if isinstance(layer, mixing) or next(layer.buffers(recurse=False), None) is not None
    ]
    return type(unfit[0]).__name__ if unfit else ""


def poisson_batches(rows: int, rate: float, steps: int, stream: torch.Generator) -> Iterator[torch.Tensor]:
    """Indices of `steps` batches, each row in each batch with probability `rate`, independently; a batch may be empty."""
    for _ in range(steps):
        yield (torch.rand(rows, generator=stream) < rate).nonzero().flatten()


def sampling_rate(rows: int, batch_size: int) -> float:
    """The probability that an image is in a batch, for an expected `batch_size` images (all if there are fewer)."""
    return min(1.0, batch_size / rows)


def private_step_count(params: TrainingParams, rows: int) -> int:
    """Steps of one stage: `params.steps`, or the number of batches in `params.epochs` over `rows` rows."""
    return params.steps or params.epochs * math.ceil(rows / params.batch_size)


class PrivateSteps:
    """Takes noisy optimiser steps in which each image's gradient is clipped to `clip`.

    A step's gradient is (sum over the batch of clipped gradients + N(0, (σ · clip)²)) / expected rows, plus the
    gradient of the loss that depends on no image.

    Args:
        module: the trained module; every layer treats rows independently.
        optimiser: over its weights.
        settings: noise and clip.
        expected_rows: rate · rows, not the rows of one batch, which depend on the images.
        noise: stream of the noise, on the module's device; also an attribute, for checkpoints.

    Attributes:
        sampled: the module while Opacus has hooks in it.
    """

    def __init__(
        self,
        module: nn.Module,
        optimiser: torch.optim.Optimizer,
        settings: DpSgdSettings,
        expected_rows: float,
        noise: torch.Generator,
    ) -> None:
        from opacus.grad_sample import GradSampleModule
        from opacus.optimizers import DPOptimizer

        self.noise = noise
        self._weights = list(module.parameters())
        self.sampled = GradSampleModule(module)
        self.sampled.disable_hooks()  # except in `step`: elsewhere the module's gradients do not belong to images
        self._optimiser = optimiser
        self._private = DPOptimizer(
            optimiser,
            noise_multiplier=settings.noise_multiplier,
            max_grad_norm=settings.clip,
            expected_batch_size=expected_rows,
            generator=noise,
        )

    def step(self, rows: int, of_images: Loss | None = None, of_no_image: Loss | None = None) -> None:
        """One step.

        Args:
            rows: images of the batch.
            of_images: mean over the batch of a loss whose row j depends only on image j; not needed for an empty batch.
            of_no_image: a loss that depends on no image.
        """
        self._private.zero_grad(set_to_none=True)
        added = None
        if of_no_image is not None:
            added = torch.autograd.grad(of_no_image(), self._weights, allow_unused=True)
        if rows and of_images is not None:
            self.sampled.enable_hooks()
            try:
                of_images().backward()
            finally:
                self.sampled.disable_hooks()
        else:
            for weight in self._weights:
                weight.grad_sample = weight.new_zeros((0, *weight.shape))  # type: ignore[attr-defined]
        self._private.pre_step()
        if added is not None:
            for weight, gradient in zip(self._weights, added, strict=True):
                if gradient is not None:
                    assert weight.grad is not None
                    weight.grad.add_(gradient)
        self._optimiser.step()


@contextmanager
def private_steps(
    modules: Iterable[nn.Module],
    optimiser: torch.optim.Optimizer,
    settings: DpSgdSettings,
    expected_rows: float,
    seed: int,
) -> Iterator[PrivateSteps]:
    """`PrivateSteps` of modules that are clipped together; `seed` seeds the noise."""
    together = nn.ModuleList(modules)
    device = next(together.parameters()).device
    noise = torch.Generator(device).manual_seed(seed)
    with warnings.catch_warnings():
        # Opacus hooks every layer, including the first, whose input needs no gradient. torch warns about it; it is
        # intended.
        warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
        steps = PrivateSteps(together, optimiser, settings, expected_rows, noise)
        try:
            yield steps
        finally:
            steps.sampled.to_standard_module()


_FORMAT = 1


class _Entry(BaseModel, frozen=True, extra="forbid", strict=True):
    noise_multiplier: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    sample_rate: Annotated[float, Field(gt=0, le=1)]
    steps: Annotated[int, Field(ge=1)]


class _Stored(BaseModel, frozen=True, extra="forbid", strict=True):
    format: Annotated[int, Field(ge=_FORMAT, le=_FORMAT)] = _FORMAT
    spent: Annotated[list[_Entry], Field(max_length=100_000)]


@functools.lru_cache(maxsize=1024)  # half a second on a busy CPU, and the same for every round of a client
def _loss_of_a_step(noise_multiplier: float, sample_rate: float) -> tuple[float, ...]:
    """Rényi divergence of one step at each of Opacus' orders."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    losses = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    return tuple(map(float, losses))


class Spent(Value):
    """The privacy spent so far.

    Attributes:
        entries: (noise multiplier, sampling rate, steps); each pair of the first two occurs once.
    """

    entries: tuple[tuple[float, float, int], ...] = ()

    def epsilon(self, delta: float) -> float:
        """ε at δ = `delta`; 0 if nothing was spent."""
        if not self.entries:
            return 0.0
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis.rdp import get_privacy_spent

        columns = [[steps * loss for loss in _loss_of_a_step(noise, rate)] for noise, rate, steps in self.entries]
        total = [sum(losses) for losses in zip(*columns, strict=True)]
        with warnings.catch_warnings():
            # At the ends of Opacus' list of orders ε is still an upper bound, but not the tightest.
            warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
            epsilon, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=delta)
        return float(epsilon)

    def with_round(self, settings: DpSgdSettings, sample_rate: float, steps: int) -> Spent:
        """The privacy spent after `steps` more steps."""
        if not steps:
            return self
        counted = {(noise, rate): count for noise, rate, count in self.entries}
        key = (settings.noise_multiplier, sample_rate)
        counted[key] = counted.get(key, 0) + steps
        return Spent(tuple((noise, rate, count) for (noise, rate), count in counted.items()))

    def exceeds(self, settings: DpSgdSettings) -> bool:
        """Whether this exceeds the budget; checked before a round for what it WOULD spend."""
        return settings.budget_epsilon is not None and self.epsilon(settings.delta) > settings.budget_epsilon

    def to_json(self) -> str:
        """Serialise; `from_json` reads it back."""
        entries = [_Entry(noise_multiplier=noise, sample_rate=rate, steps=steps) for noise, rate, steps in self.entries]
        return _Stored(spent=entries).model_dump_json()

    @staticmethod
    def from_json(text: str) -> Spent:
        """Parse what `to_json` wrote.

        Raises:
            PrivacyError: invalid text. The spent privacy is then unknown: do not continue as if it were zero.
        """
        try:
            stored = _Stored.model_validate_json(text)
        except ValueError as error:
            raise PrivacyError(f"not a record of spent privacy: {error}") from error
        return Spent(tuple((entry.noise_multiplier, entry.sample_rate, entry.steps) for entry in stored.spent))


def after_round(spent: Spent, settings: DpSgdSettings, method: Method, params: TrainingParams, rows: int) -> Spent:
    """The privacy spent after one more local round.

    Args:
        spent: before the round.
        settings: of the round.
        method: each of its `private_stages` takes the same number of steps.
        params: of the method.
        rows: number of training images; with 0 nothing is trained.
    """
    if not rows:
        return spent
    steps = method.private_stages * private_step_count(params, rows)
    return spent.with_round(settings, sampling_rate(rows, params.batch_size), steps)
