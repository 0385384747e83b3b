"""The service of a federation: the loop that drives rounds."""
