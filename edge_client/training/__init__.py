"""A local round in the training process, and the handle of that process."""
