"""The published tables: their figures, settings and required runs, compared with our runs. No torch."""
