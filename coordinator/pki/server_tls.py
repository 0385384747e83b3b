"""The TLS settings of every server of a coordinator but Mosquitto: version, client certificates, revocation in the handshake."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from coordinator.paths import CRL_NAME
from coordinator.pki.authority import CA_NAME, Credential, credential_of

log = logging.getLogger(__name__)


def server_context(
    pki: Path, credential: Credential, client_certificate: ssl.VerifyMode = ssl.CERT_OPTIONAL
) -> ssl.SSLContext:
    """TLS 1.3; a client certificate is verified when one is shown, and whether one must be shown is up to the listener.

    A revoked one fails in the handshake, from the moment on at which the revocation list names it.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(credential_of(pki, CA_NAME).certificate)
    context.load_cert_chain(credential.certificate, credential.key)
    context.verify_mode = client_certificate
    _check_revocations(context, pki / CRL_NAME)
    return context


def _check_revocations(context: ssl.SSLContext, path: Path) -> None:
    """Refuse certificates that the revocation list names, as it is in the file at each handshake; all of them without a list."""
    read = -1

    def before_handshake(*_: object) -> int | None:
        nonlocal read
        try:
            if (changed := path.stat().st_mtime_ns) != read:
                context.load_verify_locations(path)  # added: of two lists OpenSSL takes the newer
                read = changed
        except OSError as error:
            if read:
                log.error("all connections are refused: the revocation list %s can't be read: %s", path, error)  # noqa: TRY400
            read = 0
            return ssl.ALERT_DESCRIPTION_INTERNAL_ERROR
        return None

    context.load_verify_locations(path)
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF
    context.num_tickets = 0  # a resumed session would bring no certificate to look at
    context.sni_callback = before_handshake
