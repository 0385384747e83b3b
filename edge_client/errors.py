"""Errors of the agent.

EdgeError
├── ConfigError          agent.toml or the environment is invalid; lists every problem with its line
├── StoreError           the private store can't be used
│   ├── StoreLockedError     another agent (or its trainer) uses this store
│   ├── StoreFormatError     the folder has another format or owner, or is not a private store
│   ├── StoreDamagedError    no generation passes its checksums
│   └── DamagedFileError     one file was altered or truncated
├── BackupError          a backup can't be created or restored; nothing was overwritten
├── CohortError          not a valid cohort code or card
├── EnrolError           enrolling, using keys, renewing the certificate or leaving failed
│   ├── NotAcceptedError     the coordinator was not reached, is not the right one, or refuses this device
│   ├── LateAnswerError      the coordinator did not answer in time
│   └── ClockError           this device's clock and the coordinator's differ too much for a certificate
├── NoAnswerError        the coordinator does not answer this device; names the last step that worked
├── NotRunningError      no running agent to send a command to
├── OwnerRequestError    the running agent does not carry out an owner's request
├── FirewallError        something that may not leave the device was about to be sent; names device, part and tensor
└── RoundError           a local round can't be trained here; carries the reason for the decline
"""

from pathlib import Path

from fedcg.errors import ALREADY_RUNNING, BAD_INPUT, FAILED, NOT_CONNECTED, TIMED_OUT, FedcgError
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part


class EdgeError(FedcgError):
    """Base class of the agent's errors."""


class ConfigError(EdgeError):
    """The configuration is invalid; lists every problem."""

    exit_code = BAD_INPUT


class StoreError(EdgeError):
    """The private store can't be used until a person repairs it."""

    exit_code = BAD_INPUT


class BackupError(EdgeError):
    """A backup of this device can't be created or restored; nothing was overwritten."""


class CohortError(EdgeError):
    """Not a valid cohort code or card, or a secret that can't be replaced."""

    exit_code = BAD_INPUT


def unreadable(path: Path, error: OSError) -> StoreError:
    """The error for a file of the store that exists but can't be read: its content is unknown, not missing."""
    return StoreError(
        f"{error.filename or path} can't be read: {error.strerror or error}. Nothing was changed; "
        "check the disk (`dmesg`) and the file's owner and permissions, then start the agent again",
        exit_code=BAD_INPUT if isinstance(error, PermissionError) else FAILED,
    )


class StoreLockedError(StoreError):
    """Another agent or its trainer uses this store."""

    exit_code = ALREADY_RUNNING


class StoreFormatError(StoreError):
    """The folder has another format or owner, or is not a private store."""


class StoreDamagedError(StoreError):
    """No generation of the private store passes its checksums."""


class DamagedFileError(StoreError):
    """A file of the private store was altered, truncated, or replaced by an older copy."""


class EnrolError(EdgeError):
    """Enrolling, using keys, renewing the certificate or leaving failed; names the next step."""

    exit_code = BAD_INPUT


class NotAcceptedError(EnrolError):
    """The coordinator was not reached, is not the right one, or refuses this device."""

    exit_code = NOT_CONNECTED


class LateAnswerError(EnrolError):
    """The coordinator did not answer in time."""

    exit_code = TIMED_OUT


class ClockError(EnrolError):
    """This device's clock and the coordinator's differ too much for a certificate; no request was sent."""


class NoAnswerError(EdgeError):
    """The coordinator does not answer this device; names the last step that worked and the likely cause."""

    exit_code = TIMED_OUT


class NotRunningError(EdgeError):
    """There is no running agent to send a command to."""

    exit_code = NOT_CONNECTED


class OwnerRequestError(EdgeError):
    """The running agent does not carry out an owner's request."""


class FirewallError(EdgeError):
    """Something that may not leave the device was about to be sent.

    Attributes:
        device: its id.
        part: name of the part concerned; None for the report or the header.
        tensor: name of the tensor or report field concerned, if any.
    """

    def __init__(self, device: str, problem: str, *, part: Part | str | None = None, tensor: str | None = None) -> None:
        self.device = device
        self.part = part.value if isinstance(part, Part) else part
        self.tensor = tensor
        subject = "/".join(name for name in (self.part, tensor) if name is not None)
        super().__init__(f"the firewall of {device} refused{f' {subject!r}' if subject else ''}: {problem}")


class RoundError(EdgeError):
    """A local round can't be trained on this device."""

    def __init__(self, reason: DeclineReason, problem: str) -> None:
        self.reason = reason
        super().__init__(problem)
