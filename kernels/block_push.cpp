// One pass over a page: load, store, multiply, add. Words go in their own order into four sums, which is the same sum mod 2^64.
#include "block_push.h"

#include "export.h"

namespace relay {

uint64_t copy_page(const uint64_t* from, uint64_t* to, const uint64_t* coefficients, size_t n_words) {
    uint64_t sum[4] = {};
    size_t i = 0;
    for (; i + 4 <= n_words; i += 4)
        for (size_t j = 0; j < 4; j++) {
            to[i + j] = from[i + j];
            sum[j] += from[i + j] * coefficients[i + j];
        }
    for (; i < n_words; i++) {
        to[i] = from[i];
        sum[0] += from[i] * coefficients[i];
    }
    return sum[0] + sum[1] + (sum[2] + sum[3]);
}

}  // namespace relay

RELAY_EXPORT uint64_t relay_copy_page(const uint64_t* from, uint64_t* to, const uint64_t* coefficients, size_t n_words) {
    return relay::copy_page(from, to, coefficients, n_words);
}
