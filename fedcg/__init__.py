"""FedCG Edge: the code that all sides of a federation share, and the command `fedcg`."""
