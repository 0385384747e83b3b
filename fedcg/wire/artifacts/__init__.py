"""Updates and aggregates as bytes."""
