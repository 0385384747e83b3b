"""Data sets and their partition between clients."""
