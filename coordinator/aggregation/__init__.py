"""The aggregation worker: the process that uses torch and the GPU."""
