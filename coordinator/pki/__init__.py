"""The certificate authority and the signing keys."""
