"""The attacker's view and the ground truth, as different types, read from a recording and from the device's own data."""

from audit.evidence.case import Case, Colluder, Extractor, Knowledge, Truth, View, read_secret, with_images
from audit.evidence.device_data import inputs_and_features, joined, own_view, read_private, read_truth
from audit.evidence.networks import WholeModel
from audit.evidence.updates import RecordedUpdates, read_updates

__all__ = [
    "Case", "Colluder", "Extractor", "Knowledge", "RecordedUpdates", "Truth", "View", "WholeModel",
    "inputs_and_features", "joined", "own_view", "read_private", "read_secret", "read_truth", "read_updates", "with_images",
]  # fmt: skip
