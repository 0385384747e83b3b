"""Errors of the coordinator.

CoordinatorError
├── HomeError           a coordinator's directory is missing, in use, or invalid
├── ConfigError         a configuration file has errors; the message names all
├── PlanError           a federation plan is invalid
├── StoppingError       the coordinator is stopping
├── SteeringError       a change of a federation or a device is not possible now
│   └── NotFoundError   the named object does not exist
├── RequestError        the running coordinator refused a request
├── AccessError         the running coordinator rejects the token or can't be reached
├── EnrolmentError      a device can't be added
├── StoreError          the database failed, or has another version
├── AggregationError    the updates of an attempt could not be merged
├── BrokerError         no broker could be started
├── RefusedError        a device's HTTPS request is refused
└── ValidationError     an update that must not be merged; `reason` goes into the receipt
"""

from fedcg.errors import BAD_INPUT, FAILED, NOT_CONNECTED, NOT_FOUND, FedcgError


class CoordinatorError(FedcgError):
    """Base of everything the coordinator raises."""

    exit_code = BAD_INPUT


class HomeError(CoordinatorError):
    """A coordinator's directory is missing, in use, or invalid."""


class ConfigError(CoordinatorError):
    """A configuration file has errors; the message names all of them."""


class PlanError(CoordinatorError):
    """A federation plan is invalid."""


class StoppingError(CoordinatorError):
    """The coordinator is stopping and starts no long task."""

    exit_code = NOT_CONNECTED


class SteeringError(CoordinatorError):
    """A change of a federation or a device is not possible now."""


class NotFoundError(SteeringError):
    """The named object does not exist."""

    exit_code = NOT_FOUND


class RequestError(CoordinatorError):
    """The running coordinator refused a request."""


class AccessError(CoordinatorError):
    """The running coordinator rejects the token or can't be reached."""

    exit_code = NOT_CONNECTED


class EnrolmentError(CoordinatorError):
    """A device can't be added."""


class StoreError(CoordinatorError):
    """The database failed, or has another version."""

    exit_code = FAILED


class AggregationError(CoordinatorError):
    """The updates of an attempt could not be merged."""


class BrokerError(CoordinatorError):
    """No broker could be started."""


class RefusedError(CoordinatorError):
    """A device's HTTPS request is refused.

    Attributes:
        answer: message for the device. It reveals nothing about a token unless the device has presented its secret.
        status: HTTP status of the answer.
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
