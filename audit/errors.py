"""Errors of the audit.

AuditError
├── CaptureError    a recording that can't be read or written
└── DecodeError     recorded bytes that are no artifact
"""

from __future__ import annotations

from fedcg.errors import FedcgError


class AuditError(FedcgError):
    """Base of everything the audit raises."""


class CaptureError(AuditError):
    """A recording that can't be read or written."""


class DecodeError(AuditError):
    """Recorded bytes that are no artifact."""
