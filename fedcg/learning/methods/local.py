"""Local training: every client trains its own extractor and classifier alone; the baseline, and the local-only model beside other methods.

Cross-entropy alone (FedCG eq. 1). Clients upload only a report and download nothing, over the same wire format as any
method.
"""

from fedcg.learning.method import TrainingParams
from fedcg.learning.methods._averaging import averaging_method

METHOD = averaging_method("local", "Local training only (nothing is shared)", TrainingParams, frozenset())
