"""From torch to a verified model on disk."""
