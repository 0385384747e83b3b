"""A model on disk: manifest, signature, versions, runtime."""
