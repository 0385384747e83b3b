"""Figures with their floors, ceilings and confidence intervals; how alike images are."""
