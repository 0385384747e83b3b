"""The cohort secret: 32 random bytes that all devices of a federation share and the coordinator never sees.

The private networks of all devices start from it (design §5), and it opens the cohort's sealed sums. People carry it from the first device to
the others as a code: the secret and a checksum, in letters that can be read aloud. Only a mark leaves the device, which identifies equal
secrets. A revoked device keeps its secret, so the other devices then get a new one.
"""

import base64
import hashlib
import hmac
import re
import secrets

from edge_client.errors import CohortError, StoreError
from edge_client.store.private_store import PrivateStore
from fedcg.errors import EXISTS
from fedcg.files import SECRET_BYTES

_CHECK_BYTES = 3
_GROUP = 4
_LETTERS = -(-(SECRET_BYTES + _CHECK_BYTES) * 8 // 5)
# The most commonly misread characters. Base32 does not use 0, 1, 8 and 9.
_MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B"})


def create(store: PrivateStore, *, replace: bool = False) -> str:
    """Create the cohort secret on the first device or, with `replace`, a new one on any device. Returns the code for the others.

    Raises:
        StoreError: a secret exists, or private networks of this store have started without one.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    _keep(store, secret, replace=replace)
    return code_of(secret)


def join(store: PrivateStore, code: str, *, replace: bool = False) -> bool:
    """Save the secret from a code. Returns False if it was already there.

    Args:
        store: of the device.
        code: from `create`.
        replace: replace an existing secret.

    Raises:
        CohortError: the text is not a cohort code.
        StoreError: another secret exists, or private networks of this store have started without one.
    """
    secret = secret_of(code)
    if store.cohort_secret() == secret:
        return False
    _keep(store, secret, replace=replace)
    return True


def _keep(store: PrivateStore, secret: bytes, *, replace: bool) -> None:
    anew = f"To start again with an empty store: stop the agent, `mv {store.root} {store.root}.before`, repeat this command, start the agent"
    has_one = store.cohort_secret() is not None
    if has_one and not replace:
        raise StoreError(
            f"{store.root} already has a cohort secret. To replace it for the whole cohort: `fedcg cohort renew` on one device, "
            f"`fedcg cohort join --replace` on the others. {anew}",
            exit_code=EXISTS,
        )
    if not has_one and store.generations.current()[0] is not None:
        raise StoreError(
            f"{store.root}: private networks have started here without a cohort secret and can't change their start. {anew}"
        )
    store.keep_cohort_secret(secret)


def code_of(secret: bytes) -> str:
    """The code of a secret: 14 groups of four letters and digits."""
    letters = base64.b32encode(secret + _check(secret)).decode()
    return "-".join(letters[at : at + _GROUP] for at in range(0, _LETTERS, _GROUP))


def secret_of(code: str) -> bytes:
    """The secret in a code. Spacing and case are ignored.

    Raises:
        CohortError: wrong length, invalid character or wrong checksum.
    """
    letters = re.sub(r"[\s-]+", "", code).upper().translate(_MISREAD)
    strange = sorted(set(re.findall(r"[^A-Z2-7]", letters)))
    if strange:
        raise CohortError(f"a cohort code has letters and the digits 2 to 7, not {strange[0]!r}")
    if len(letters) != _LETTERS:
        raise CohortError(
            f"a cohort code has {_LETTERS} letters and digits in groups of {_GROUP}; this one has {len(letters)}"
        )
    data = base64.b32decode(letters)
    secret, check = data[:SECRET_BYTES], data[SECRET_BYTES:]
    if not hmac.compare_digest(check, _check(secret)):
        raise CohortError("the code is mistyped: its checksum is wrong; compare it group by group")
    return secret


def mark_of(secret: bytes, federation: str) -> str:
    """The mark of a secret that a device publishes: 32 hex digits, equal for equal secrets of a federation.

    An HMAC of 256 random bits can't be inverted or brute-forced. It includes the federation's name, so the same secret has different marks in
    different federations.
    """
    return hmac.new(secret, b"fedcg cohort mark 1\0" + federation.encode(), hashlib.sha256).hexdigest()[:32]


def mark_in(store: PrivateStore, federation: str) -> str | None:
    """The mark of a store's secret; None without a secret."""
    secret = store.cohort_secret()
    return None if secret is None else mark_of(secret, federation)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"fedcg cohort code 1\0" + secret).digest()[:_CHECK_BYTES]
