/* BatchNorm by shard, forward and backward, for shards that lie one behind the other.
 *
 * What lies in memory is (pieces, rows, channels, values). A channel of a piece is read once from
 * memory, and again from the cache. Each function is there for float (`_float`) and double
 * (`_double`); sums are in one fixed order, whatever the processor.
 */
#ifndef ALLRANKS_NORMS_H
#define ALLRANKS_NORMS_H

#include <stdint.h>

#include "../../native/clones.h"

struct shape {
    int64_t pieces, rows, channels, values;
};

#define FUNCTIONS_OF(T)                                                                           \
    /* `mean` and `var` (biased) of each channel of each piece, `inverse` = 1 / sqrt(var + eps),  \
     * and `output` = (input - mean) * inverse * weight + bias. No `weight`: 1; no `bias`: 0. */  \
    void normalise_##T(const T *input, struct shape shape, const T *weight, const T *bias,        \
                       double eps, T *output, T *mean, T *var, T *inverse);                       \
    /* The `gradient` of the output becomes that of the input, which is left out if `found` is    \
     * none, and the sums `of_weight` and `of_bias`, (channels,). */                              \
    void derive_##T(const T *gradient, const T *input, struct shape shape, const T *weight,       \
                    const T *mean, const T *inverse, T *found, T *of_weight, T *of_bias);

FUNCTIONS_OF(float)
FUNCTIONS_OF(double)

#endif
