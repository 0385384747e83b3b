"""Splits, generators and discriminators, built for a feature shape."""

from fedcg.learning.networks.assembly import (
    NETWORKS,
    build_part,
    feature_shape,
    layout_of,
    layouts,
    load_part,
    weights_of,
)
from fedcg.learning.networks.splits import FeatureRange, Split

__all__ = [
    "NETWORKS",
    "FeatureRange",
    "Split",
    "build_part",
    "feature_shape",
    "layout_of",
    "layouts",
    "load_part",
    "weights_of",
]
