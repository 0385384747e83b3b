"""From a torch model to a verified model on disk."""
