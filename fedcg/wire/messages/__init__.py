"""What is said, signed, in which order, on which topic."""
