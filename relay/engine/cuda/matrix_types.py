"""Which types of a file's matrices stay packed on a device, and what a matrix takes there. No torch: plans are made with it."""

from typing import Final

from relay.model.packed import row_bytes

_INPUTS: Final = 64  # the kernel takes so many at a time
_OUTPUTS: Final = 32  # outputs are filled up to a multiple
_PACKED: Final = ("Q4_0", "Q4_1", "Q4_K", "Q8_0")
_MORE: Final = {"Q4_K": 4}  # bytes of 256 inputs beyond what the file has: its small scales are a byte each


def packs(kind: str, n_in: int) -> bool:
    """Else it becomes dense, 2 bytes a weight."""
    return kind in _PACKED and n_in % _INPUTS == 0


def device_bytes(kind: str, n_out: int, n_in: int) -> int:
    """Of one matrix."""
    if not packs(kind, n_in):
        return 2 * n_out * n_in
    return -(-n_out // _OUTPUTS) * _OUTPUTS * (row_bytes(kind, n_in) + _MORE.get(kind, 0) * n_in // 256)
