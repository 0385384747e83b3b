"""Errors of the devices package.

DeviceError
├── CatalogueError     the catalogue of known modules is not what it must be
└── NotTrainableError  the box cannot train with us; says why and what is possible
"""

from __future__ import annotations

from fedcg.errors import FedcgError


class DeviceError(FedcgError):
    """Base of everything the devices package raises."""


class CatalogueError(DeviceError):
    """The catalogue of known modules is not what it must be."""


class NotTrainableError(DeviceError):
    """The box cannot train with us; the message says why and what is possible instead."""
