"""Backbones from timm, weights that others trained, and what follows from freezing them."""
