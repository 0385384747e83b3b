"""Errors of the coordinator.

CoordinatorError
├── HomeError           a coordinator's directory that is missing, in use, or not what it should be
├── ConfigError         a configuration file with errors; all of them are named
├── PlanError           a federation plan that can't be opened
├── StoppingError       the coordinator ends meanwhile
├── SteeringError       a change of a federation or a device that can't be made now
│   └── NotFoundError   what was named does not exist
├── RequestError        a request that the running coordinator refused
├── AccessError         the running coordinator does not accept the token, or it is not there
├── EnrolmentError      a device that can't be added
├── StoreError          the database refused, or has another version
├── AggregationError    the updates of an attempt could not be merged
├── BrokerError         no broker could be started
├── RefusedError        a request of a device over HTTPS that is not granted
└── ValidationError     an update that must not be merged; `reason` goes into the receipt
"""

from fedcg.errors import BAD_INPUT, FAILED, NOT_CONNECTED, NOT_FOUND, FedcgError


class CoordinatorError(FedcgError):
    """Base of everything the coordinator raises."""

    exit_code = BAD_INPUT


class HomeError(CoordinatorError):
    """A coordinator's directory that is missing, in use, or not what it should be."""


class ConfigError(CoordinatorError):
    """A configuration file with errors; all of them are named."""


class PlanError(CoordinatorError):
    """A federation plan that can't be opened."""


class StoppingError(CoordinatorError):
    """The coordinator ends, and begins nothing that takes long."""

    exit_code = NOT_CONNECTED


class SteeringError(CoordinatorError):
    """A change of a federation or a device that can't be made now."""


class NotFoundError(SteeringError):
    """What was named does not exist."""

    exit_code = NOT_FOUND


class RequestError(CoordinatorError):
    """A request that the running coordinator refused."""


class AccessError(CoordinatorError):
    """The running coordinator does not accept the token, or it is not there."""

    exit_code = NOT_CONNECTED


class EnrolmentError(CoordinatorError):
    """A device that can't be added."""


class StoreError(CoordinatorError):
    """The database refused, or has another version."""

    exit_code = FAILED


class AggregationError(CoordinatorError):
    """The updates of an attempt could not be merged."""


class BrokerError(CoordinatorError):
    """No broker could be started."""


class RefusedError(CoordinatorError):
    """A request of a device over HTTPS that is not granted.

    Attributes:
        answer: for the device; reveals nothing about a token whose secret the device has not shown.
        status: of the answer.
    """

    def __init__(self, answer: str, reason: str = "", *, status: int = 403) -> None:
        super().__init__(reason or answer)
        self.answer = answer
        self.status = status


class ValidationError(CoordinatorError):
    """An update that must not be merged.

    Attributes:
        client: the client that sent it.
        reason: a short text for the receipt.
    """

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"update of {client}: {reason}")
        self.client = client
        self.reason = reason
