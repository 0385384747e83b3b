"""The messages: their schemas, signatures, order and topics."""
