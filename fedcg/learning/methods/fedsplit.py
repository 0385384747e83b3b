"""FedSplit, as FedCG's tables call it (LG-FedAvg, Liang et al., 2020): the classifier is shared, the extractor private.

Each client's extractor learns a representation of its own, and classifiers are averaged by data size. Deviation from
LG-FedAvg: no model of the first rounds is shared as a whole beforehand; all start from the same weights instead.
"""

from fedcg.learning.methods._averaging import MomentumParams, averaging_method
from fedcg.wire.parts import Part

METHOD = averaging_method(
    "fedsplit",
    "FedSplit: classifier averaged by data size, private extractor",
    MomentumParams,
    frozenset({Part.CLASSIFIER}),
)
