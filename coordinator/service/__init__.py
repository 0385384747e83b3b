"""One federation at work: the loop that drives rounds."""
