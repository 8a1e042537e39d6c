"""The random number of a token: a pure function of (seed, choice, position), with no generator state to carry or to lose.

Three rounds of splitmix64's finalizer, a bijection of 64-bit words in which every input bit flips every output bit with probability one
half, each after adding its odd constant and folding in the next part of the key:

    z = mix(seed + G);  z = mix((z ^ choice) + G);  z = mix((z ^ position) + G);  uniform = (z >> 11) / 2^53

Distinct positions of one (seed, choice) never share a word, nor do distinct choices at one stage. Source: Steele, Lea, Flood, "Fast
splittable pseudorandom number generators", 2014; constants are Stafford's variant 13.
"""

from typing import Final

_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1


def _mix(z: int) -> int:
    z = (z + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2^-53. Keys are taken modulo 2^64, so negative seeds are as good as others."""
    z = _mix(seed & _MASK)
    z = _mix(z ^ (choice & _MASK))
    z = _mix(z ^ (position & _MASK))
    return (z >> 11) * 2.0**-53
