"""What one hostile client costs the honest ones, with and without the coordinator's defence."""
