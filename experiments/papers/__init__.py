"""The published tables: their figures, their settings, which runs they need, and our runs beside them. No torch."""
