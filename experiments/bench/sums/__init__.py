"""What it costs to open a sum of several devices' numbers and nothing else."""
