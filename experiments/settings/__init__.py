"""Options of demo and simulation as one value."""
