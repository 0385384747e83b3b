"""Classifier calibration with virtual features (CCVR, Luo et al., NeurIPS 2021), from moments of the cohort's features.

Deviations: one covariance for all classes instead of one each, which needs a C-th of the numbers and is as good; features are cut to their range,
as extractors end in a ReLU or a sigmoid; classes are drawn alike instead of by their sizes.
"""

import torch

from fedcg.learning.heads.moments import ClassGaussians, highest_feature
from fedcg.learning.method import RoundContext, Weights, check_finite
from fedcg.learning.networks import feature_shape, load_part, weights_of
from fedcg.learning.training.losses import cross_entropy
from fedcg.learning.training.optimisers import adam
from fedcg.wire.parts import Part

STEPS, BATCH, RATE = 400, 64, 3e-4


def calibrated(head: Weights, classes: ClassGaussians, ctx: RoundContext) -> dict[str, torch.Tensor]:
    """A classifier after Adam steps on features drawn from the classes, at a rate that falls to 0.

    Features are drawn from the cohort's secret, for all devices alike; the last digits still differ between processors.

    Args:
        head: the averaged classifier's weights.
        classes: of the cohort's features.
        ctx: spec, device, round, cohort.

    Raises:
        DivergedError: the result is not finite.
    """
    assert ctx.cohort.streams is not None  # methods that calibrate need the secret
    streams = ctx.cohort.streams.at(ctx.round, "calibrate")
    asked, noise = streams.generator("classes"), streams.generator("noise")
    classifier = load_part(ctx.spec, Part.CLASSIFIER, head, ctx.device).train()
    optimiser = adam(classifier.parameters(), RATE, 0.0)
    root = (classes.vectors * classes.values.sqrt()).T.float().to(ctx.device)  # Σ = rootᵀ root
    means, present = classes.means.float().to(ctx.device), classes.present
    highest, shape = highest_feature(ctx.spec), feature_shape(ctx.spec)
    for step in range(STEPS):
        labels = present[torch.randint(len(present), (BATCH,), generator=asked)].to(ctx.device)
        drawn = torch.randn(BATCH, len(root), generator=noise).to(ctx.device)
        features = (means[labels] + drawn @ root).clamp(0.0, highest)
        loss = cross_entropy(classifier(features.view(-1, *shape)), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.param_groups[0]["lr"] = RATE * (1.0 - step / STEPS)
        optimiser.step()
        ctx.callbacks.progress("calibrate", step + 1, STEPS)
    found = weights_of(classifier)
    check_finite({Part.CLASSIFIER: found}, "after the calibration")
    return found
