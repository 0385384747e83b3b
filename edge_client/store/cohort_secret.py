"""The cohort's secret: 32 random bytes that all devices of a federation have and the coordinator never sees.

The private networks of all devices start from it (design §5), and it opens the cohort's sealed sums. People carry it from the first device to
the others as a code, which is the secret and a checksum, in letters that can be read aloud; only a mark leaves the device, by which equal
secrets are recognised. A revoked device keeps the secret that it had, so the others then get another one.
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
# What is misread most often; neither 0, 1, 8 nor 9 is a letter of base32.
_MISREAD = str.maketrans({"0": "O", "1": "I", "8": "B"})


def create(store: PrivateStore, *, replace: bool = False) -> str:
    """Make the cohort's secret on its first device, or with `replace` another one on any; the code to carry to the others.

    Raises:
        StoreError: there is one here, or private networks of this store have started without it.
    """
    secret = secrets.token_bytes(SECRET_BYTES)
    _keep(store, secret, replace=replace)
    return code_of(secret)


def join(store: PrivateStore, code: str, *, replace: bool = False) -> bool:
    """Put the secret that a code holds into the store; False when it was there already.

    Args:
        store: of the device.
        code: of `create`.
        replace: also in the place of another secret.

    Raises:
        CohortError: the text is not a cohort code.
        StoreError: another secret is here, or private networks of this store have started without it.
    """
    secret = secret_of(code)
    if store.cohort_secret() == secret:
        return False
    _keep(store, secret, replace=replace)
    return True


def _keep(store: PrivateStore, secret: bytes, *, replace: bool) -> None:
    anew = f"To begin anew with an empty store: stop the agent, `mv {store.root} {store.root}.before`, give this command again, start the agent"
    has_one = store.cohort_secret() is not None
    if has_one and not replace:
        raise StoreError(
            f"{store.root} has a cohort secret already. Where the whole cohort gets another one: `fedcg cohort renew` on one device, "
            f"`fedcg cohort join --replace` on the others. {anew}",
            exit_code=EXISTS,
        )
    if not has_one and store.generations.current()[0] is not None:
        raise StoreError(
            f"{store.root}: private networks have started here without a cohort secret, and can't change their start. {anew}"
        )
    store.keep_cohort_secret(secret)


def code_of(secret: bytes) -> str:
    """The code of a secret: 14 groups of four letters and digits."""
    letters = base64.b32encode(secret + _check(secret)).decode()
    return "-".join(letters[at : at + _GROUP] for at in range(0, _LETTERS, _GROUP))


def secret_of(code: str) -> bytes:
    """The secret in a code, however it is spaced and in capitals or not.

    Raises:
        CohortError: too short, too long, a strange letter, or mistyped.
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
    """The mark of a secret that a device publishes: equal for equal secrets of a federation, 32 hex digits.

    An HMAC of 256 random bits can't be inverted or tried out, and the federation's name in it keeps two federations of the same
    secret apart.
    """
    return hmac.new(secret, b"fedcg cohort mark 1\0" + federation.encode(), hashlib.sha256).hexdigest()[:32]


def mark_in(store: PrivateStore, federation: str) -> str | None:
    """The mark of a store's secret, None without one."""
    secret = store.cohort_secret()
    return None if secret is None else mark_of(secret, federation)


def _check(secret: bytes) -> bytes:
    return hashlib.sha256(b"fedcg cohort code 1\0" + secret).digest()[:_CHECK_BYTES]
