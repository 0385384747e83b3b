"""The worker process that owns torch and the GPU."""
