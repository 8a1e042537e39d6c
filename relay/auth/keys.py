"""The keys that a server knows, and finding the one that was presented without telling by time how near it came."""

import hashlib
import hmac
import secrets
from collections.abc import Iterable

from relay.auth.caller import Caller
from relay.auth.entry import Entry
from relay.errors import Unauthorized

_PREFIX = "sk-relay-"  # some clients want sk-, and secret scanners want something to look for


def new_key() -> str:
    """256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def hash_of(key: bytes) -> str:
    """As the key file has it."""
    return hashlib.sha256(key).hexdigest()


class KeyRing:
    """Immutable. However many keys there are, finding one is one look-up.

    The look-up goes by a hash with a secret of this ring over the key's hash: what a client can vary has no known relation to what is
    compared, so the time of the look-up tells nothing; the last comparison takes constant time.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._secret = secrets.token_bytes(32)
        self._known = {
            self._blind(bytes.fromhex(entry.sha256)): (bytes.fromhex(entry.sha256), entry.caller(), entry.expires_s) for entry in entries
        }

    def __len__(self) -> int:
        return len(self._known)

    def find(self, presented: Iterable[bytes], now_s: float) -> Caller:
        """Whose key it is: the first of those presented that is known. `now_s` is Unix time. Raises Unauthorized; no text has the key."""
        refusal = "no API key was sent; send it as `Authorization: Bearer KEY`"
        for key in presented:
            digest = hashlib.sha256(key).digest()
            known, caller, expires_s = self._known.get(self._blind(digest), (b"", None, 0.0))
            if not hmac.compare_digest(known, digest) or caller is None:
                refusal = "the API key is not known here; ask for one from whoever runs this server"
            elif expires_s <= now_s:
                refusal = f"the API key `{caller.name}` has expired; ask for a new one from whoever runs this server"
            else:
                return caller
        raise Unauthorized(refusal)

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._secret, digest_size=32).digest()
