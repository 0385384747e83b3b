"""The error of the devices package."""

from __future__ import annotations

from fedcg.errors import FedcgError


class NotTrainableError(FedcgError):
    """The box cannot train with us; the message says why and what is possible instead."""
