"""Layers and their weights, below whole networks: fast convolutions of small maps, spectral norm, stacked clients."""
