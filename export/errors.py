"""Errors of export and inference.

ExportError
├── InputError            a file that cannot be classified: missing, not an image
├── ModelError            a model directory that cannot be used
│   ├── ManifestError     no manifest, or one that is not valid
│   └── TamperedError     the model's bytes are not the ones the manifest names
├── SlotError             no such version, or nothing to roll back to
├── GateError             the new model is worse than the one in service
├── ServingError          the server cannot start: its port is taken, its address is not this machine's
├── RefusedError          a request that the server does not answer with a prediction
│   └── QueueFullError    the queue is full
├── ConversionError       the network could not be written as ONNX
└── VerificationError     the ONNX model does not do what the trained one does
"""

from fedcg.errors import BAD_INPUT, FedcgError
from fedcg.event_log import log_text


class ExportError(FedcgError):
    """Base of everything this package raises."""

    exit_code = BAD_INPUT


class InputError(ExportError):
    """A file that cannot be classified.

    Attributes:
        file: the file's name as the caller gave it.
        reason: what is wrong with it.
    """

    def __init__(self, file: str, reason: str, exit_code: int | None = None) -> None:
        super().__init__(f"{log_text(file)}: {reason}", exit_code=exit_code)
        self.file = file
        self.reason = reason


class ModelError(ExportError):
    """A model directory that cannot be used."""


class ManifestError(ModelError):
    """No manifest in the directory, or one that is not valid."""


class TamperedError(ModelError):
    """The model's bytes are not the ones the manifest names."""


class SlotError(ExportError):
    """No such version, or nothing to roll back to."""


class GateError(ExportError):
    """The new model is worse on this box's held-out images than the one in service, which stays."""


class ServingError(ExportError):
    """The server cannot start."""


class RefusedError(ExportError):
    """A request that the server does not answer with a prediction.

    Attributes:
        status: the HTTP status, 400 to 599.
        code: which refusal it is, one word for programs.
        field: what of the request is meant: a file's name, a position in an array, a header; "" when it is no part of it.
        retry_after_s: seconds after which the same request may succeed; None when it never will.
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
        """The document that answers the request, over HTTP and over MQTT."""
        return {"error": {"code": self.code, "message": str(self), "field": self.field or None}}


class QueueFullError(RefusedError):
    """The queue is full; the same request may succeed in a moment."""

    def __init__(self, why: str) -> None:
        super().__init__(429, "queue_full", f"{why}; try again in a second", retry_after_s=1)


class ConversionError(ExportError):
    """The network could not be written as ONNX."""


class VerificationError(ExportError):
    """The ONNX model does not do what the trained model does; it must not be served."""
