"""Which of two models validation prefers: one rule for agents and simulations."""

from __future__ import annotations


def is_preferred(
    accuracy: float | None, loss: float | None, other_accuracy: float | None, other_loss: float | None
) -> bool:
    """Whether a newer model replaces the best one so far: higher validation accuracy, lower validation loss between equals.

    The older of two that are equal in both stays. Without validation images (None) the newer one is preferred.

    Args:
        accuracy: of the newer model on the validation images, in [0, 1].
        loss: its mean cross-entropy there.
        other_accuracy: of the best model so far.
        other_loss: its mean cross-entropy.
    """
    if accuracy is None or other_accuracy is None:
        return True
    return (accuracy, -(loss or 0.0)) > (other_accuracy, -(other_loss or 0.0))
