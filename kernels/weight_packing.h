// From the rows of a model file to the packed groups of packed_matmul.h.
#pragma once
#include "packed_matmul.h"

namespace relay {

// Bytes of one row of `n_in` inputs in the file.
size_t source_row_bytes(Format format, int n_in);

// Pack 16 rows into one group. rows[i]: the row's bytes in the file, null for a row of zeros. `to` has group_bytes(format, n_blocks).
void pack_group(Format format, const uint8_t* const* rows, int n_in, uint8_t* to);

}  // namespace relay
