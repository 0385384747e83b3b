"""The demo, simulations and partitions of data sets."""
