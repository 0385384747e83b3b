"""Local training: every client trains its own extractor and classifier alone; the baseline, and the shadow of other methods.

Cross-entropy alone (FedCG eq. 1). Nothing but a report goes up and nothing comes down, over the same wire as any method.
"""

from fedcg.learning.method import TrainingParams
from fedcg.learning.methods._averaging import averaging_method

METHOD = averaging_method("local", "Local training only (nothing is shared)", TrainingParams, frozenset())
