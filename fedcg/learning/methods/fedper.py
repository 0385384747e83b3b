"""FedPer (Arivazhagan et al., 2019): base layers are shared, personalisation layers stay private.

Base layers = the extractor, averaged by data size; personalisation layers = the classifier. As in the paper's algorithm
1, both are trained together in every local step. A device participates only if its `allow_upload` lists the extractor.
"""

from fedcg.learning.method import Average, TrainingParams
from fedcg.learning.methods._averaging import averaging_method
from fedcg.wire.parts import Part


class FedPerParams(TrainingParams):
    """Parameters of FedPer."""

    average: Average = "mean"


METHOD = averaging_method(
    "fedper", "FedPer: extractor averaged by data size, private classifier", FedPerParams, frozenset({Part.EXTRACTOR})
)
