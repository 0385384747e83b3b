"""Splits, generators and discriminators, built from the feature shape."""

from fedcg.learning.networks.assembly import (
    Networks,
    build,
    build_part,
    feature_shape,
    layout_of,
    layouts,
    load_part,
    weights_of,
)

__all__ = ["Networks", "build", "build_part", "feature_shape", "layout_of", "layouts", "load_part", "weights_of"]
