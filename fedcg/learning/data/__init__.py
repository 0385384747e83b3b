"""Images to tensors."""
