"""The traffic on the wire: an independent observer, its recording, and a search for private tensors in it."""
