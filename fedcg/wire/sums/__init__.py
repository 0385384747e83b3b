"""Sums of numbers of several devices, of which nobody sees a single one's: the protocol of Bonawitz et al. (CCS 2017) for an active server."""
