"""FedSplit, as FedCG's tables call it (LG-FedAvg, Liang et al., 2020): the classifier is shared, the extractor private.

Each client's extractor learns its own representation, and classifiers are averaged by data size. Deviation from
LG-FedAvg: there are no initial rounds that share the whole model. All clients start from the same weights instead.
"""

from fedcg.learning.methods._averaging import MomentumParams, averaging_method
from fedcg.wire.parts import Part

METHOD = averaging_method(
    "fedsplit",
    "FedSplit: classifier averaged by data size, private extractor",
    MomentumParams,
    frozenset({Part.CLASSIFIER}),
)
