"""Errors of the agent.

EdgeError
├── ConfigError          agent.toml or its environment is wrong; lists every problem with its line
├── StoreError           the private store can't be used
│   ├── StoreLockedError     another agent (or its trainer) uses this store
│   ├── StoreFormatError     of another format or owner, or not a private store at all
│   ├── StoreDamagedError    no generation passes its checksums
│   └── DamagedFileError     one file was altered or truncated
├── BackupError          a backup can't be made or restored; nothing was overwritten
├── CohortError          text that is not a cohort code
├── EnrolError           this box could not be enrolled, its keys not used, its certificate not renewed, or it could not leave
│   ├── NotAcceptedError     the coordinator was not reached, is not the right one, or refuses this box
│   ├── LateAnswerError      the coordinator did not answer in time
│   └── ClockError           this box's clock and the coordinator's differ too much for a certificate
├── NoAnswerError        the coordinator does not answer this device; names the step that messages reached
├── NotRunningError      no agent runs that a command could reach
├── OwnerRequestError    the running agent does not carry out an owner's request
├── FirewallError        something that may not leave the device was about to; names device, part and tensor
└── RoundError           a local round can't be done here; carries the reason that goes into the decline
"""

from pathlib import Path

from fedcg.errors import ALREADY_RUNNING, BAD_INPUT, FAILED, NOT_CONNECTED, TIMED_OUT, FedcgError
from fedcg.wire.messages.schemas import DeclineReason
from fedcg.wire.parts import Part


class EdgeError(FedcgError):
    """Base of everything the agent raises."""


class ConfigError(EdgeError):
    """The configuration is wrong; lists every problem."""

    exit_code = BAD_INPUT


class StoreError(EdgeError):
    """The private store can't be used, until a person mends it."""

    exit_code = BAD_INPUT


class BackupError(EdgeError):
    """A backup of this device can't be made or restored; nothing was overwritten."""


class CohortError(EdgeError):
    """Text that is no cohort code or card, or a secret that can't be replaced."""

    exit_code = BAD_INPUT


def unreadable(path: Path, error: OSError) -> StoreError:
    """The error for a file of the store that exists and can't be read: its content is unknown, not absent."""
    return StoreError(
        f"{error.filename or path} can't be read: {error.strerror or error}. Nothing was changed; "
        "check the disk (`dmesg`) and the file's owner and permissions, then start the agent again",
        exit_code=BAD_INPUT if isinstance(error, PermissionError) else FAILED,
    )


class StoreLockedError(StoreError):
    """Another agent, or the trainer of one, uses this store."""

    exit_code = ALREADY_RUNNING


class StoreFormatError(StoreError):
    """The folder has another format or owner, or is not a private store."""


class StoreDamagedError(StoreError):
    """No generation of the private store passes its checksums."""


class DamagedFileError(StoreError):
    """A file of the private store was altered, truncated, or replaced by an older copy."""


class EnrolError(EdgeError):
    """This box could not be enrolled, its keys not used, its certificate not renewed, or it could not leave; names the next step."""

    exit_code = BAD_INPUT


class NotAcceptedError(EnrolError):
    """The coordinator was not reached, is not the right one, or refuses this box."""

    exit_code = NOT_CONNECTED


class LateAnswerError(EnrolError):
    """The coordinator did not answer in time."""

    exit_code = TIMED_OUT


class ClockError(EnrolError):
    """This box's clock and the coordinator's differ too much for a certificate; nothing was asked for."""


class NoAnswerError(EdgeError):
    """The coordinator does not answer this device; names the step that messages reached and the likely cause."""

    exit_code = TIMED_OUT


class NotRunningError(EdgeError):
    """No agent runs that a command could reach."""

    exit_code = NOT_CONNECTED


class OwnerRequestError(EdgeError):
    """The running agent does not carry out an owner's request."""


class FirewallError(EdgeError):
    """Something that may not leave the device was about to leave it.

    Attributes:
        device: its id.
        part: name of the part concerned, or None where the report or the header is.
        tensor: name of the tensor or report field concerned, where there is one.
    """

    def __init__(self, device: str, problem: str, *, part: Part | str | None = None, tensor: str | None = None) -> None:
        self.device = device
        self.part = part.value if isinstance(part, Part) else part
        self.tensor = tensor
        subject = "/".join(name for name in (self.part, tensor) if name is not None)
        super().__init__(f"the firewall of {device} refused{f' {subject!r}' if subject else ''}: {problem}")


class RoundError(EdgeError):
    """A local round can't be done on this device."""

    def __init__(self, reason: DeclineReason, problem: str) -> None:
        self.reason = reason
        super().__init__(problem)
