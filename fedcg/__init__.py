"""FedCG Edge: what all sides of a federation agree on, and the command `fedcg`."""
