"""Names of KV blocks by what is in them: chained hashes of token ids, under a namespace.

The key of a full block depends on its tokens and on all before it, so equal keys mean equal prefixes, but for collisions; who uses a key
compares tokens too. Namespaces are tagged by domain: a client's salt can never meet a model's name or an adapter's.
"""

from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b

BlockKey = bytes  # 16 bytes
HINT_BYTES = 8  # of a key, what the router's index keeps


def namespace(model: str, salt: str = "") -> BlockKey:
    """The root that chains of one model and one client's `cache_salt` hang from."""
    parts = (b"model", model.encode()), (b"salt", salt.encode())
    tagged = b"".join(len(name).to_bytes(2, "big") + name + len(value).to_bytes(4, "big") + value for name, value in parts)
    return blake2b(tagged, digest_size=16).digest()


def next_key(previous: BlockKey, tokens: Sequence[int]) -> BlockKey:
    """Key of the block that holds `tokens` after the block with key `previous`."""
    return blake2b(array("i", tokens).tobytes(), digest_size=16, key=previous).digest()


def chain(root: BlockKey, tokens: Sequence[int], block_tokens: int) -> Iterator[BlockKey]:
    """Keys of all full blocks of a sequence, in order."""
    key = root
    for end in range(block_tokens, len(tokens) + 1, block_tokens):
        key = next_key(key, tokens[end - block_tokens : end])
        yield key
