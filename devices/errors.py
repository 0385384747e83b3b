"""The error of the devices package."""

from __future__ import annotations

from fedcg.errors import FedcgError


class NotTrainableError(FedcgError):
    """The box cannot train; the message gives the reason and the alternative."""
