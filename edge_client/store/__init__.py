"""Data that survives a power cut: private state, generations, snapshot, cohort secret."""
