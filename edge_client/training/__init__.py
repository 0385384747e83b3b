"""One local round in the trainer process, and the handle on that process."""
