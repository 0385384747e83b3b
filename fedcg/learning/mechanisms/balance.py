"""Keeps a client's label distribution out of the classifier that it sends. Counter-measures against label inference.

The last bias of a classifier that was trained on unbalanced labels encodes their shares, and so do the weights before it.

`logits` is logit adjustment (Menon et al., 2021, eq. 10): cross-entropy of logits + log p_i(y), with p_i the client's label shares.
The logits themselves then need not encode p_i. It is done by the bias alone, because C(h) + log p_i(y) is the same classifier
with another last bias: the round starts from the aggregate's classifier with log p_i added to its last bias, trains as ever,
and log p_i is taken off the copy that is sent. The private copy keeps it, so that the model which is evaluated and exported fits the
client's own labels. Where a method asks the classifier for more than the client's images (replayed features, a generator), the
adjustment is in there too. A method that keeps its classifier is not changed.

`bias` is the plain removal: the last bias is sent as it came in the aggregate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fedcg.learning.errors import PrivacyError
from fedcg.learning.method import Weights
from fedcg.learning.networks.assembly import skeleton
from fedcg.learning.networks.layers.layer_randomness import lent_generators
from fedcg.learning.spec import NetworkSpec
from fedcg.wire.parts import Part

Parts = Mapping[Part, Weights]


def log_prior(label_counts: Sequence[int]) -> torch.Tensor:
    """The client's log p_i(y), [C] float32; every class counts one image more, so that none is impossible."""
    counts = torch.tensor(label_counts, dtype=torch.float64) + 1.0
    return (counts / counts.sum()).log().float()


def last_bias(spec: NetworkSpec) -> str:
    """Name of the classifier's tensor that is added to the logits.

    Raises:
        PrivacyError: the classifier does not end in a linear layer with a bias.
    """
    with lent_generators(0):
        leaves = [
            (name, layer)
            for name, layer in skeleton(spec, Part.CLASSIFIER).named_modules()
            if not list(layer.children())
        ]
    name, layer = leaves[-1]
    if not isinstance(layer, nn.Linear) or layer.bias is None or layer.out_features != len(spec.classes):
        raise PrivacyError(
            f"balance needs a classifier that ends in a linear layer with a bias; that of network.split = "
            f"{spec.network.split} ends in {type(layer).__name__}: choose another split, or leave balance out"
        )
    return f"{name}.bias" if name else "bias"


def with_added(parts: Parts, bias: str, numbers: torch.Tensor) -> dict[Part, Weights]:
    """The parts with `numbers`, [C], added to the classifier's tensor `bias`; unchanged where they hold no classifier."""
    if Part.CLASSIFIER not in parts:
        return dict(parts)
    classifier = parts[Part.CLASSIFIER]
    return {**parts, Part.CLASSIFIER: {**classifier, bias: classifier[bias] + numbers}}


def with_bias_of(parts: Parts, bias: str, base: Parts) -> dict[Part, Weights]:
    """The parts with the classifier's tensor `bias` taken from `base`; unchanged where they hold no classifier."""
    if Part.CLASSIFIER not in parts:
        return dict(parts)
    kept = base[Part.CLASSIFIER][bias].clone()
    return {**parts, Part.CLASSIFIER: {**parts[Part.CLASSIFIER], bias: kept}}
