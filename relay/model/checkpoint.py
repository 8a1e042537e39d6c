"""A model's spec and its tensors by slot, packed as they lie in the file, from any format: what weights and kernels are built of.

    checkpoint = open_checkpoint(path)
    q = checkpoint.matrix("layers.0.q")         # q.type is "Q4_1", q.rows uint8 [n_out, bytes of a row]: no copy, nothing unpacked
    norm = checkpoint.vector("layers.0.attn_norm")  # float32 [n]: what a row is multiplied with

Slots are those of `relay.model.slots`, in the order and meaning of our own forward pass: q and k rows have been put into half-split order
where a file interleaves them (which moves rows as whole bytes), and norms that a file holds as w of (1 + w) are 1 + w. Everything is
checked when a checkpoint is opened: a tensor that is missing, has another shape or a type that is not read here, and one that nothing
would read (a bias that is left out makes another model), is a ModelError. No torch.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from relay.errors import ModelError
from relay.model.packed import PackedMatrix, TensorSource, row_bytes
from relay.model.placing import Place
from relay.model.slots import Slot, slots
from relay.model.spec import ModelSpec

MATRIX_TYPES: Final = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")
VECTOR_TYPES: Final = ("F32", "F16", "BF16")


class Checkpoint:
    """Read-only; may be shared by threads."""

    def __init__(
        self,
        spec: ModelSpec,
        source: TensorSource,
        place: Callable[[ModelSpec, Slot], Place],
        *,
        interleaved_qk: bool = False,
        one_plus: bool = False,
        may_be_left: Callable[[str], bool] = lambda name: False,
    ) -> None:
        """interleaved_qk, one_plus: as in `Architecture`, where the file does so. may_be_left: names of tensors that need not be read.

        Raises ModelError."""
        self.spec = spec
        self._source = source
        self._interleaved, self._one_plus = interleaved_qk, one_plus
        self._slots = {slot.name: slot for slot in slots(spec)}
        self._places = {name: place(spec, slot) for name, slot in self._slots.items()}
        self._check(may_be_left)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all slots, in the order of a forward pass."""
        return tuple(self._slots)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._slots[name].shape

    def type(self, name: str) -> str:
        """As the file has it."""
        return self._source.infos()[self._places[name].tensor].type

    def matrix(self, name: str) -> PackedMatrix:
        """The packed rows of a slot with two dimensions."""
        (n_out, n_in), place = self._slots[name].shape, self._places[name]
        kind = self._source.infos()[place.tensor].type
        rows = self._source.data(place.tensor).reshape(-1, row_bytes(kind, n_in))[place.first_row : place.first_row + n_out]
        if self._interleaved and self._slots[name].part in ("q", "k"):
            rows = rows[half_split(n_out, self.spec.head_dim)]
        return PackedMatrix(kind, n_in, rows)

    def vector(self, name: str) -> NDArray[np.float32]:
        """The numbers of a slot with one dimension."""
        slot, place = self._slots[name], self._places[name]
        kind, data = self._source.infos()[place.tensor].type, self._source.data(place.tensor)
        match kind:
            case "BF16":
                values = (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
            case _:
                values = np.frombuffer(data, np.float16 if kind == "F16" else np.float32).astype(np.float32)
        if self._interleaved and slot.part in ("q_bias", "k_bias"):
            values = values[half_split(len(values), self.spec.head_dim)]
        if self._one_plus and slot.name.endswith("norm"):
            values += np.float32(1.0)
        return values

    def _check(self, may_be_left: Callable[[str], bool]) -> None:
        infos, where = self._source.infos(), self._source.where
        unserved: dict[str, list[str]] = {}
        for name, place in self._places.items():
            info = infos.get(place.tensor)
            if info is None:
                raise ModelError(f"{where}: the tensor `{place.tensor}` is missing; fetch the model again or use another")
            if info.shape != place.shape:
                raise ModelError(f"{where}: the tensor `{place.tensor}` has shape {list(info.shape)}; expected {list(place.shape)}")
            if info.type not in (VECTOR_TYPES if len(self.shape(name)) == 1 else MATRIX_TYPES):
                unserved.setdefault(info.type, []).append(place.tensor)
        if unserved:
            found = ", ".join(f"{kind} ({len(tensors)} tensors, such as `{tensors[0]}`)" for kind, tensors in unserved.items())
            raise ModelError(f"{where}: it has tensors of types that are not served: {found}. Expected {', '.join(MATRIX_TYPES)}")
        read = {place.tensor for place in self._places.values()}
        left = [name for name in infos if name not in read and not may_be_left(name)]
        if left:
            raise ModelError(f"{where}: nothing here reads {len(left)} of its tensors, such as `{left[0]}`: it is another kind of model")


def half_split(n_rows: int, head_dim: int) -> NDArray[np.int64]:
    """Where to find, in rows whose rope pairs are (2i, 2i+1) in each head, those in the order (i, i + head_dim/2): int64 [n_rows]."""
    return np.arange(n_rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)
