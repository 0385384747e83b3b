"""Layers of our own, equal to torch's in value and gradient, and layers that draw their own random numbers."""

from collections.abc import Callable, Iterable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from fedcg.learning.networks import fast_layers
from fedcg.learning.networks.gan import DISCRIMINATORS, rows_are_independent
from fedcg.learning.networks.randomness import draw_weights, lent_generators
from tests.support.present import present
from tests.support.raising import raising

SHAPES = [((1, 1), (2, 2)), ((3, 3), (2, 2)), ((1, 1), (1, 1)), ((2, 4), (3, 1)), ((3, 1), (3, 5))]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize(("smaller", "kernel"), SHAPES)
def test_a_form_gives_convolution_and_gradients(smaller: tuple[int, int], kernel: tuple[int, int], grows: bool) -> None:
    size = smaller if grows else (smaller[0] + kernel[0] - 1, smaller[1] + kernel[1] - 1)
    maps = drawn(3, 5, *size).requires_grad_()
    weight = drawn(*((5, 4) if grows else (4, 5)), *kernel).requires_grad_()
    form = present(fast_layers.form_for(maps, weight, grows=grows))
    ours = fast_layers.convolved(maps, weight, form)
    theirs = (F.conv_transpose2d if grows else F.conv2d)(maps, weight)
    assert torch.allclose(ours, theirs, atol=1e-12)
    back = drawn(*theirs.shape)
    mine = torch.autograd.grad(ours, [maps, weight], back)
    for one, other in zip(mine, torch.autograd.grad(theirs, [maps, weight], back), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_larger_maps_are_left_to_torch_with_the_same_result() -> None:
    assert not fast_layers.is_small((5, 5), (2, 2))
    layer = fast_layers.SmallConvTranspose2d(3, 4, (2, 2))
    draw_weights(layer, torch.Generator().manual_seed(1))
    maps = torch.randn(2, 3, 9, 9)
    assert fast_layers.form_for(maps, layer.weight, grows=True) is None
    assert torch.allclose(layer(maps), F.conv_transpose2d(maps, layer.weight), atol=1e-6)


def test_a_layer_loads_and_starts_as_torchs_own_does() -> None:
    ours, theirs = fast_layers.SmallConvTranspose2d(3, 4, (2, 2)), nn.ConvTranspose2d(3, 4, 2, bias=False)
    for layer in (ours, theirs):
        draw_weights(layer, torch.Generator().manual_seed(1))
    assert torch.equal(ours.weight, theirs.weight)
    assert {name: tensor.shape for name, tensor in ours.state_dict().items()} == {
        name: tensor.shape for name, tensor in theirs.state_dict().items()
    }


THEIR_NAMES = {"weight": "parametrizations.weight.original"}
THEIR_NAMES |= {
    f"vectors.{ours}": f"parametrizations.weight.0.{theirs}" for ours, theirs in (("left", "_u"), ("right", "_v"))
}


@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [
        (fast_layers.SpectralConv2d(3, 4, (2, 2)), spectral_norm(nn.Conv2d(3, 4, 2)), (5, 3, 3, 3)),
        (
            fast_layers.SpectralConv2d(3, 4, (2, 2), bias=False),
            spectral_norm(nn.Conv2d(3, 4, 2, bias=False)),
            (5, 3, 9, 9),
        ),
        (fast_layers.SpectralLinear(6, 4), spectral_norm(nn.Linear(6, 4)), (5, 6)),
        (fast_layers.MapBatchNorm2d(3), nn.BatchNorm2d(3), (5, 3, 2, 4)),
    ],
)
def test_a_normalising_layer_has_the_values_gradients_and_state_of_torchs(
    ours: nn.Module, theirs: nn.Module, shape: tuple[int, ...]
) -> None:
    def renamed(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        known = theirs.state_dict()
        return {name if name in known else THEIR_NAMES[name]: tensor for name, tensor in named}

    draw_weights(ours, torch.Generator().manual_seed(1))
    ours, theirs = ours.double(), theirs.double()
    theirs.load_state_dict(renamed(ours.state_dict().items()))
    for is_training in (True, True, False):
        one, other = (drawn(*shape).requires_grad_() for _ in range(2))
        came, due = ours.train(is_training)(one), theirs.train(is_training)(other)
        assert torch.allclose(came, due, atol=1e-10)
        for each in (came, due):
            each.square().sum().backward()
        assert torch.allclose(present(one.grad), present(other.grad), atol=1e-9)
    mine, state = renamed(ours.named_parameters()), renamed(ours.state_dict().items())
    for name, weight in theirs.named_parameters():
        assert torch.allclose(present(mine[name].grad), present(weight.grad), atol=1e-9)
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(state[name], tensor, atol=1e-10)


@pytest.mark.parametrize("wants_input_gradient", [True, False])
@pytest.mark.parametrize("size", [(6, 6), (7, 9), (32, 32)])
@pytest.mark.parametrize(
    ("kind", "pool"), [(fast_layers.AveragedConv2d, F.avg_pool2d), (fast_layers.MaxedConv2d, F.max_pool2d)]
)
def test_a_pooling_convolution_is_a_convolution_and_then_a_pool(
    kind: type[fast_layers.AveragedConv2d | fast_layers.MaxedConv2d],
    pool: Callable[[torch.Tensor, int], torch.Tensor],
    size: tuple[int, int],
    wants_input_gradient: bool,
) -> None:
    layer = kind(3, 4, 5).double()
    draw_weights(layer, torch.Generator().manual_seed(1))
    images = drawn(2, 3, *size).requires_grad_(wants_input_gradient)
    theirs = pool(F.conv2d(images, layer.weight, layer.bias), 2)
    ours = layer(images)
    assert torch.allclose(ours, theirs, atol=1e-12)
    wanted = [*([images] if wants_input_gradient else []), *layer.parameters()]
    mine = torch.autograd.grad(ours.square().sum(), wanted)
    for one, other in zip(mine, torch.autograd.grad(theirs.square().sum(), wanted), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_only_the_published_discriminator_needs_a_pass_for_each_kind_of_row() -> None:
    independent = {name: rows_are_independent(build((16, 5, 5), 3)) for name, build in DISCRIMINATORS.items()}
    alone = {"conv": True, "conv_plain": True, "conv_published": False, "mlp": True, "mlp_plain": True}
    assert independent == alone


def test_generators_are_given_back_when_a_stage_fails() -> None:
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError), lent_generators(7):
        raising(ZeroDivisionError)(torch.rand(5))
    assert torch.equal(torch.get_rng_state(), before)
