"""Errors of the audit.

AuditError
├── CaptureError        a recording that can't be read or written, or lacks what was asked for
├── DecodeError         bytes that are not what they should be: an artifact, private weights
├── TruthError          images or private weights that are not those of the update
├── UnknownAttackError  an attack that there is not
└── GateFormError       a gate that can't be read
"""

from fedcg.errors import BAD_INPUT, NOT_FOUND, FedcgError


class AuditError(FedcgError):
    """Base of everything the audit raises."""

    exit_code = BAD_INPUT


class CaptureError(AuditError):
    """A recording that can't be read or written."""


class DecodeError(AuditError):
    """Recorded bytes that are no artifact."""


class TruthError(AuditError):
    """Images or private weights that are not those of the update."""


class UnknownAttackError(AuditError):
    """An attack that there is not."""

    exit_code = NOT_FOUND


class GateFormError(AuditError):
    """A gate that can't be read."""
