"""Training loops and losses of a device."""
