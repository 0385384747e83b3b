"""Errors of the wire.

WireError
├── MalformedError       bytes that are not what the protocol allows
│   └── TooLargeError    a declared or real size above its bound
├── CodecError           numbers that the chosen codec can't hold
├── SignatureError       a signature that does not verify, or an unknown sender
├── OrderError           an old, repeated or foreign message (epoch, round, attempt, session, counter)
├── IntegrityError       content whose sha256 or layout is not the declared one
│   └── UnknownBaseError a difference to an aggregate that is not at hand
├── CapacityError        a bound of our own is taken up; the other side tries again later
└── TransportError       the link or the broker refused
"""

from __future__ import annotations


class WireError(Exception):
    """Base of everything the wire raises."""


class MalformedError(WireError):
    """Bytes that are not what the protocol allows."""


class TooLargeError(MalformedError):
    """A declared or real size above its bound."""


class CodecError(WireError):
    """Numbers that the chosen codec can't hold."""


class SignatureError(WireError):
    """A signature that does not verify, or a sender nobody enrolled."""


class OrderError(WireError):
    """An old, repeated or foreign message."""


class IntegrityError(WireError):
    """Content whose digest or layout is not the declared one."""


class UnknownBaseError(IntegrityError):
    """A difference to an aggregate that is not at hand."""


class CapacityError(WireError):
    """A bound of our own is taken up; the other side tries again later."""


class TransportError(WireError):
    """The link or the broker refused."""
