// Blocks in their order, one layer after the other: each page is read once, from its first word to its last, as memory likes it.
#include <cstddef>
#include <cstdint>

#include "export.h"

namespace relay {
namespace {

uint64_t sum_page(const uint64_t* words, const uint64_t* coefficients, size_t n_words) {
    uint64_t sum[8] = {};
    size_t i = 0;
    for (; i + 8 <= n_words; i += 8)
        for (size_t j = 0; j < 8; j++) sum[j] += words[i + j] * coefficients[i + j];
    for (; i < n_words; i++) sum[0] += words[i] * coefficients[i];
    for (size_t j = 1; j < 8; j++) sum[0] += sum[j];
    return sum[0];
}

}  // namespace
}  // namespace relay

// pages [n_layers, 2, n_pool_blocks, n_words], coefficients [2, n_words], sums [n_layers, n_blocks].
RELAY_EXPORT void relay_block_checksums(const uint64_t* pages, int32_t n_layers, int32_t n_pool_blocks, int64_t n_words,
                                        const uint64_t* coefficients, const int32_t* blocks, int32_t n_blocks, uint64_t* sums) {
    const auto words = static_cast<size_t>(n_words), side = static_cast<size_t>(n_pool_blocks) * words;
    for (int32_t layer = 0; layer < n_layers; layer++)
        for (int32_t i = 0; i < n_blocks; i++) {
            const uint64_t* k = pages + 2 * static_cast<size_t>(layer) * side + static_cast<size_t>(blocks[i]) * words;
            *sums++ = relay::sum_page(k, coefficients, words) + relay::sum_page(k + side, coefficients + words, words);
        }
}
