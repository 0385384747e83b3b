"""Separate roots of randomness. Every stream is a function of (root, federation, round, attempt, purpose).

Never seeds anything globally. Design §5, "Randomness".
"""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from fedcg.values import Value

if TYPE_CHECKING:
    import torch


class Streams(Value):
    """Named random streams of one root.

    Attributes:
        root: secret bytes (device, cohort or coordinator secret) or the public spec seed.
        scope: federation, round and attempt, already joined.
    """

    root: bytes
    scope: str = ""

    def at(self, *scope: object) -> Streams:
        """The same root in a narrower scope, e.g. `streams.at(federation, round, attempt)`."""
        return Streams(self.root, "/".join([self.scope, *map(str, scope)]))

    def seed(self, *purpose: object) -> int:
        """A 63-bit seed for a purpose: HMAC-SHA256(root, scope | purpose)."""
        label = "/".join([self.scope, *map(str, purpose)])
        return int.from_bytes(hmac.new(self.root, label.encode(), hashlib.sha256).digest()[:8], "big") >> 1

    def generator(self, *purpose: object) -> torch.Generator:
        """A new `torch.Generator` for a purpose. A second call returns the same stream from its start."""
        import torch

        return torch.Generator().manual_seed(self.seed(*purpose))


def spec_root(seed: int) -> bytes:
    """The public root of a spec: initial weights of the SHARED parts."""
    return hashlib.sha256(f"fedcg spec seed {seed}".encode()).digest()
