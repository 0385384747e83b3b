"""FedAvg (McMahan et al., AISTATS 2017): the whole model is shared and averaged by data size.

Algorithm 1: every client trains from the global model, and w = Σ_k n_k / n · w_k is the next one. Deviations: Adam is
the default optimiser of every method here (`optimiser=sgd` is the paper's), and all invited clients that answered in
time count. A device participates only if its `allow_upload` lists the extractor.
"""

from fedcg.learning.methods._averaging import PERSONAL, MomentumParams, averaging_method

METHOD = averaging_method("fedavg", "FedAvg: extractor and classifier averaged by data size", MomentumParams, PERSONAL)
