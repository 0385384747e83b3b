"""Every loss of both papers, each in one place, with the direction of a divergence in its name.

Shapes: logits [B, C], features [B, *shape], noise [B, q], labels [B] int64. Every loss is a scalar tensor, a mean over
the batch, and is MINIMISED. No function detaches tensors: callers pass detached targets if a paper trains only one
side. `LossMeter` sums losses and stops diverged training.
"""

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from fedcg.learning.method import DivergedError
from fedcg.values import Value

# A mean loss above this counts as diverged, like NaN: uniform guessing over 10,000 classes costs 9.2. Mode seeking at
# exact collapse is 1e5 times its weight, so a generator with constant output counts as diverged at the default weight.
EXPLODED = 1e4
_EPS = 1e-5
_LEAST_PROBABILITY = 1e-30


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy Ω of logits and labels (FedCG eq. 1; FedMD-CG eq. 1, 3, 6)."""
    return F.cross_entropy(logits, labels)


def feature_mse(features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Squared distance of features to a target (FedCG eq. 2; FedMD-CG eq. 2 and 5), a MEAN over batch AND elements.

    The papers print the squared norm. FedCG's authors use the mean over elements. The literal sum (400 times the weight
    at 400 features) collapses the features, so both papers are read as a mean.
    """
    return F.mse_loss(features, target)


def discriminator_loss(real_logits: torch.Tensor, fake_logits: torch.Tensor) -> torch.Tensor:
    """FedCG eq. 4, first line, as minimised: -log D(h) - log(1 - D(ĥ)), with D = sigmoid(logit).

    The paper prints log(1 - D(h)) + log D(ĥ), read as MINIMISED so that D tends to 1 on real features. Binary
    cross-entropy has the same optimum, and the same slope where D is wrong, without the printed form's minus infinity.
    """
    return real_loss(real_logits) + fake_loss(fake_logits)


def real_loss(logits: torch.Tensor) -> torch.Tensor:
    """-log D(h), the half of `discriminator_loss` for real features."""
    return F.softplus(-logits).mean()


def fake_loss(logits: torch.Tensor) -> torch.Tensor:
    """-log(1 - D(ĥ)), the half of `discriminator_loss` for generated features."""
    return F.softplus(logits).mean()


def generator_loss(fake_logits: torch.Tensor) -> torch.Tensor:
    """FedCG eq. 4, second line, in the common non-saturating form: -log D(ĥ) instead of log(1 - D(ĥ))."""
    return F.softplus(-fake_logits).mean()


def mode_seeking(
    features_a: torch.Tensor, features_b: torch.Tensor, noise_a: torch.Tensor, noise_b: torch.Tensor
) -> torch.Tensor:
    """Diversity term of mode-seeking GANs (FedCG §4.1): 1 / (d(ĥ_a, ĥ_b) / d(z_a, z_b) + 1e-5), d = mean absolute difference.

    Args:
        features_a: features of `noise_a`; row j has the same label as row j of `features_b`.
        features_b: features of `noise_b`.
        noise_a: [B, q].
        noise_b: [B, q].
    """
    ratio = (features_a - features_b).abs().mean() / (noise_a - noise_b).abs().mean()
    return 1.0 / (ratio + _EPS)


def paired_labels(labels: torch.Tensor) -> torch.Tensor:
    """Labels for `mode_seeking`: rows j and j + B//2 share a label; the batch's first half twice (plus one row if B is odd). [B]."""
    half = len(labels) // 2
    return torch.cat([labels[:half], labels[: len(labels) - half]])


def kl_rows(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p ‖ q) per row = Σ_k p_k (log p_k - log q_k), from log-probabilities. [B, C], [B, C] -> [B]."""
    return (log_p.exp() * (log_p - log_q)).sum(dim=1)


def kl_teacher_student(teacher_logits: torch.Tensor, student_logits: torch.Tensor) -> torch.Tensor:
    """KL(teacher ‖ student), mean over rows: FedCG eq. 6, KL(P_c ‖ P_s). It is mode-covering."""
    return kl_rows(teacher_logits.log_softmax(1), student_logits.log_softmax(1)).mean()


class Divergence(Value):
    """FedMD-CG's divergence between a student's and a teacher's softmax (eq. 2, 5, 10, 11), per row.

    The paper prints KL(student ‖ teacher) at temperature 1. The authors' code computes KL(teacher ‖ student), at
    temperature 10 except in eq. 5. The student is the side being trained: in eq. 2 the real branch D_i(F_i(x)), in eq.
    5 the generated branch, in eq. 10-11 the term with the global generator or classifier.

    Attributes:
        direction: order of the arguments; `teacher_student` is mode-covering, `student_teacher` is not.
        temperature: divides the logits before the softmax. Losses are not multiplied by its square.
    """

    direction: Literal["student_teacher", "teacher_student"] = "student_teacher"
    temperature: float = 1.0

    def log_softmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Log-probabilities at the temperature. [B, C] -> [B, C]."""
        return (logits / self.temperature).log_softmax(1)

    def rows(self, student_logits: torch.Tensor, log_teacher: torch.Tensor) -> torch.Tensor:
        """Divergence per row, from the student's logits and the teacher's log-probabilities, both [B, C]. [B]."""
        log_student = self.log_softmax(student_logits)
        if self.direction == "student_teacher":
            return kl_rows(log_student, log_teacher)
        return kl_rows(log_teacher, log_student)

    def mean(self, student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
        """Mean over rows, from logits on both sides."""
        return self.rows(student_logits, self.log_softmax(teacher_logits)).mean()

    def summand(self, log_teacher: torch.Tensor) -> torch.Tensor:
        """One teacher's summand of eq. 10: its log-probabilities, or its probabilities. [B, C] -> [B, C]."""
        return log_teacher if self.direction == "student_teacher" else log_teacher.exp()

    def rows_of_mean(self, student_logits: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        """Eq. 10, Σ_i τ_i KL between student and ρ_i, from only the teachers' τ-weighted MEAN summand.

        The τ_i of one label sum to 1, so Σ_i τ_i Σ_k s_k (log s_k - log ρ_ik) = Σ_k s_k (log s_k - Σ_i τ_i log ρ_ik).
        In the other direction the sum is KL(Σ_i τ_i ρ_i ‖ s) plus a term that does not depend on the student.

        Args:
            student_logits: [B, C].
            mean: [B, C]; rows of zeros, for a label that no client has, give finite values, which the caller must
                weight with 0.

        Returns:
            [B].
        """
        if self.direction == "student_teacher":
            return kl_rows(self.log_softmax(student_logits), mean)
        return kl_rows(mean.clamp(min=_LEAST_PROBABILITY).log(), self.log_softmax(student_logits))


def _published_diversity(features: torch.Tensor, noise: torch.Tensor, weights: torch.Tensor | float) -> torch.Tensor:
    exponent = -_distances(features.flatten(1)) * _distances(noise) * weights
    return exponent.mean().exp()


def _distances(rows: torch.Tensor) -> torch.Tensor:
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def diversity_0(
    features: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, _scale: torch.Tensor
) -> torch.Tensor:
    """FedMD-CG eq. 7, L_div^0 = exp(mean over j, k of -‖f_j - f_k‖·‖z_j - z_k‖), as published.

    At 128-dimensional noise the exponent is near -200 and the term underflows to 0 in float32, gradient and all.
    """
    return _published_diversity(features, noise, 1.0)


def diversity_1(features: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """FedMD-CG L_div^1: eq. 7 with [z; y] instead of z, y one-hot; as published (see `diversity_0`)."""
    one_hot = F.one_hot(labels, scale.shape[0]).to(noise.dtype)
    return _published_diversity(features, torch.cat([noise, one_hot], dim=1), 1.0)


def diversity_2(
    features: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, _scale: torch.Tensor
) -> torch.Tensor:
    """FedMD-CG eq. 8, L_div^2: eq. 7 weighted by exp(‖y_j - y_k‖_1), which is 1 within a class and e² between; as published."""
    between = labels[:, None] != labels[None, :]
    return _published_diversity(features, noise, torch.where(between, 2.0, 0.0).exp())


def diversity_mean_squared(
    features: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """L_div^2 as in the authors' code: every distance of eq. 8 is a MEAN over dimensions (squared for features and noise).

    exp(-mean over j, k of mean_d (f_j - f_k)² · mean_d (z_j - z_k)² · exp(mean_c |y_j - y_k|)): no underflow, and a
    pair of two classes has weight exp(2 / C) instead of the paper's e².
    """
    between = labels[:, None] != labels[None, :]
    weights = torch.where(between, 2.0 / scale.shape[0], 0.0).exp()
    apart = _distances(features.flatten(1)).square() / features[0].numel()
    exponent = -apart * _distances(noise).square() / noise.shape[1] * weights
    return exponent.mean().exp()


def diversity_normalised(
    features: torch.Tensor, noise: torch.Tensor, labels: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """A diversity term that works in float32: L_div^0 on NORMALISED distances, over pairs of one class.

    exp(-mean over pairs j < k with y_j = y_k of min(‖f_j - f_k‖ / s_y, 1) · ‖z_j - z_k‖ / √(2q)). s_y is the root mean
    square distance of two real features of the class, √(2q) that of two noise vectors. So each factor is about 1 for a
    generator with the spread of the real features, in any dimension. Deviations from eq. 7-8, with reasons: the
    division keeps the exponent near -1 (no underflow); pairs of different classes are left out, because eq. 5 and 6
    already separate classes, but only this term preserves the spread within a class; and distances are capped at the
    real one, so the term cannot push features out of the real range. Zero if no two rows share a label.

    Args:
        features: [B, *shape] generated features.
        noise: [B, q].
        labels: [B].
        scale: [C], s_y per class, > 0.
    """
    first, second = torch.triu_indices(len(labels), len(labels), offset=1, device=labels.device)
    same = labels[first] == labels[second]
    weight = same.to(features.dtype)
    flat = features.flatten(1)
    spread = torch.linalg.vector_norm(flat[first] - flat[second], dim=1) / scale[labels[first]]
    apart = torch.linalg.vector_norm(noise[first] - noise[second], dim=1) / (2.0 * noise.shape[1]) ** 0.5
    pairs = weight.sum()
    mean = (spread.clamp(max=1.0) * apart * weight).sum() / pairs.clamp(min=1.0)
    return torch.where(pairs > 0, (-mean).exp(), torch.zeros_like(mean))


DiversityLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
DIVERSITIES: Mapping[str, DiversityLoss] = {
    "normalised": diversity_normalised,
    "published_0": diversity_0,
    "published_1": diversity_1,
    "published_2": diversity_2,
    "mean_squared": diversity_mean_squared,
}


def check_loss(mean: float, what: str) -> float:
    """Check that training can continue with this mean loss.

    Raises:
        DivergedError: it is not finite, or over `EXPLODED`.
    """
    if not math.isfinite(mean) or mean > EXPLODED:
        raise DivergedError(f"{what}: mean loss {mean}; the state from before this round is kept")
    return mean


class LossMeter:
    """Sums losses on the device. Reads them, which waits for the device, only on request."""

    def __init__(self, what: str, device: str) -> None:
        self._what = what
        self._sum = torch.zeros((), device=device)
        self._steps = 0
        self._looked_at = (0.0, 0)
        self.latest, self.least = math.nan, math.inf

    def add(self, loss: torch.Tensor) -> None:
        """Count one step's loss."""
        self._sum += loss.detach()
        self._steps += 1

    def kept(self) -> dict[str, torch.Tensor]:
        """Its state for a checkpoint."""
        counts = [*self._looked_at, self._steps, self.latest, self.least]
        return {"sum": self._sum, "counts": torch.tensor(counts, dtype=torch.float64)}

    def restore(self, kept: Mapping[str, torch.Tensor]) -> None:
        """Restore the state of a checkpoint."""
        total, earlier, steps, self.latest, self.least = kept["counts"].tolist()
        self._sum.copy_(kept["sum"])
        self._looked_at, self._steps = (total, int(earlier)), int(steps)

    def look(self) -> float:
        """Mean loss since the last look or check, unchecked. Requires at least one step since then."""
        total, steps = float(self._sum), self._steps
        before, earlier = self._looked_at
        self._looked_at = (total, steps)
        return (total - before) / (steps - earlier)

    def check(self) -> float:
        """Mean loss since the last check.

        Raises:
            DivergedError: it is not finite, or over `EXPLODED`.
        """
        mean = check_loss(float(self._sum) / max(self._steps, 1), self._what)
        self._sum.zero_()
        self._steps = 0
        self._looked_at = (0.0, 0)
        self.latest, self.least = mean, min(self.least, mean)
        return mean
