"""What box is this, and what can it carry: detection of device, memory and GPU, and the plan for training on it."""
