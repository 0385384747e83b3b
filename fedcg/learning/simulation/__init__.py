"""Many clients in one process."""
