"""Data sets dealt out to clients."""
