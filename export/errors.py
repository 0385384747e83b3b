"""Errors of export and inference.

ExportError
├── InputError            a file that cannot be classified: missing, not an image
├── ModelError            an unusable model directory
│   ├── ManifestError     missing or invalid manifest
│   └── TamperedError     the model's bytes do not match the manifest
├── SlotError             no such version, or no version to roll back to
├── GateError             the new model is worse than the one in service
├── ServingError          the server cannot start: the port is in use, or the address is not local
├── RefusedError          a request that gets an error instead of a prediction
│   └── QueueFullError    the queue is full
├── ConversionError       the network could not be written as ONNX
└── VerificationError     the ONNX model's outputs differ from the trained model's
"""

from fedcg.errors import BAD_INPUT, FedcgError
from fedcg.event_log import log_text


class ExportError(FedcgError):
    """Base of all errors of this package."""

    exit_code = BAD_INPUT


class InputError(ExportError):
    """A file that cannot be classified.

    Attributes:
        file: the file's name as the caller gave it.
        reason: why it cannot be classified.
    """

    def __init__(self, file: str, reason: str, exit_code: int | None = None) -> None:
        super().__init__(f"{log_text(file)}: {reason}", exit_code=exit_code)
        self.file = file
        self.reason = reason


class ModelError(ExportError):
    """An unusable model directory."""


class ManifestError(ModelError):
    """The manifest is missing or invalid."""


class TamperedError(ModelError):
    """The model's bytes do not match the manifest."""


class SlotError(ExportError):
    """No such version, or no version to roll back to."""


class GateError(ExportError):
    """The new model is worse on the device's held-out images than the one in service, which stays in service."""


class ServingError(ExportError):
    """The server cannot start."""


class RefusedError(ExportError):
    """A request that gets an error instead of a prediction.

    Attributes:
        status: the HTTP status, 400 to 599.
        code: machine-readable name of the error.
        field: the part of the request at fault: a file's name, a position in an array, a header; "" for none.
        retry_after_s: seconds after which the same request may succeed; None if it will not.
    """

    def __init__(
        self, status: int, code: str, message: str, *, field: str = "", retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.field = field
        self.retry_after_s = retry_after_s

    def as_json(self) -> dict[str, object]:
        """The error response, over HTTP and MQTT."""
        return {"error": {"code": self.code, "message": str(self), "field": self.field or None}}


class QueueFullError(RefusedError):
    """The queue is full. The same request may succeed later."""

    def __init__(self, why: str) -> None:
        super().__init__(429, "queue_full", f"{why}; try again in a second", retry_after_s=1)


class ConversionError(ExportError):
    """The network could not be written as ONNX."""


class VerificationError(ExportError):
    """The ONNX model's outputs differ from the trained model's; it must not be served."""
