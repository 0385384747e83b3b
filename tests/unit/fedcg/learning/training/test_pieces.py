"""A batch that goes through the networks in pieces, for want of memory: the step is that of the whole batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedcg.learning.training.training_loop import classification_step, pieces


@given(rows=st.integers(1, 300), most=st.integers(2, 300))
def test_pieces_cover_the_batch_once_none_is_too_large_and_none_is_one_row_alone(rows: int, most: int) -> None:
    cut = pieces(rows, most)
    assert [index for one in cut for index in range(one.start, one.stop)] == list(range(rows))
    sizes = [one.stop - one.start for one in cut]
    assert rows == 1 or min(sizes) >= 2
    assert max(sizes) <= max(most, 3)  # three rows can't be cut into two and one
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("most_rows", [5, 7, 16, None])
def test_a_step_in_pieces_is_that_of_the_batch(most_rows: int | None) -> None:
    images, labels = torch.randn(16, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 3
    beside = torch.linspace(-1.0, 1.0, 16).view(16, 1)
    widest = 0

    def note_rows(_: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        nonlocal widest
        widest = max(widest, len(given[0]))

    def penalty(features: torch.Tensor, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((features - targets) ** 2).mean() + 0.1 * logits.abs().mean()

    def train(at_once: int | None) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(3)
        extractor, classifier = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Tanh()), nn.Linear(6, 3)
        extractor.register_forward_pre_hook(note_rows)
        weights: list[torch.Tensor] = [*extractor.parameters(), *classifier.parameters()]
        step = classification_step(extractor, classifier, torch.optim.SGD(weights, lr=0.5), penalty, most_rows=at_once)
        losses = [step(images, labels, beside) for _ in range(5)][-1]
        return weights, losses

    whole, expected = train(None)
    widest = 0
    cut, losses = train(most_rows)
    assert widest <= (most_rows or 16)
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=1e-6)
    for one, other in zip(cut, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
