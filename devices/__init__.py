"""What box this is and what it can carry now."""
