// Copies KV pages into another pool and sums them on the way. See block_push.py.
#pragma once
#include <cstddef>
#include <cstdint>

namespace relay {

// Copy `n_words` 64-bit words; returns the sum of word[i] * coefficient[i] mod 2^64.
uint64_t copy_page(const uint64_t* from, uint64_t* to, const uint64_t* coefficients, size_t n_words);

}  // namespace relay
