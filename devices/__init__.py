"""Detects the machine, its memory and its GPU, and plans the training on it."""
