"""Data defences: they rewrite or encrypt a device's training images before training with any method."""
