"""Errors of the audit.

AuditError
├── CaptureError        a recording that can't be read or written, or lacks the requested update
├── DecodeError         an artifact or private weights that can't be decoded
├── TruthError          images or private weights that do not belong to the update
├── UnknownAttackError  an unknown attack
├── TimeLimitError      an attack that was not done within the time of its effort
└── GateFormError       a malformed gate
"""

from fedcg.errors import BAD_INPUT, NOT_FOUND, FedcgError


class AuditError(FedcgError):
    """Base of everything the audit raises."""

    exit_code = BAD_INPUT


class CaptureError(AuditError):
    """A recording that can't be read or written."""


class DecodeError(AuditError):
    """Recorded bytes or private weights that can't be decoded."""


class TruthError(AuditError):
    """Images or private weights that do not belong to the update."""


class UnknownAttackError(AuditError):
    """An unknown attack."""

    exit_code = NOT_FOUND


class TimeLimitError(AuditError):
    """An attack that was not done within the time of its effort."""


class GateFormError(AuditError):
    """A malformed gate."""
