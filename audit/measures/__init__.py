"""Figures with their floors, ceilings and confidence intervals."""
