"""Data defences: what rewrites a device's training images, or encrypts them, before any method sees them."""
