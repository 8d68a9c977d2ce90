/* What codecs do with numbers one by one, in C: as many bytes a second as memory gives, not a tenth.
 *
 * The bytes are those of the Python files beside this folder, which say what they mean. Each function
 * is there for float (`_float`) and double (`_double`); all are pure functions of what they are given.
 */
#ifndef ALLRANKS_CODECS_H
#define ALLRANKS_CODECS_H

#include <stdbool.h>
#include <stdint.h>

#include "../../native/clones.h"

#define FOUR_BIT_CHUNK 512 /* numbers with a scale of their own */

#define FUNCTIONS_OF(T)                                                                           \
    /* (count, length) columns become messages of `bits` a number and two bounds. */              \
    void columns_encode_##T(const T *columns, int64_t count, int64_t length, int bits,            \
                            uint8_t *messages);                                                   \
    /* What messages say is added `alpha` times, or replaces what is there. */                    \
    void columns_decode_##T(const uint8_t *messages, int64_t count, int64_t length, int bits,     \
                            T *into, double alpha, bool adds);                                    \
    /* Of each of (count, length) the indices of the `keep` < length largest, ascending; false    \
     * where there is no memory. */                                                               \
    bool top_k_##T(const T *rows, int64_t count, int64_t length, int64_t keep, int64_t *indices); \
    void two_bit_encode_##T(const T *flat, int64_t count, double threshold, uint8_t *message,     \
                            int64_t bytes);                                                       \
    void two_bit_add_##T(const uint8_t *message, int64_t count, double threshold, double alpha,   \
                         T *into);                                                                \
    void four_bit_encode_##T(const T *flat, int64_t count, uint8_t *message, int64_t bytes);      \
    void four_bit_add_##T(const uint8_t *message, int64_t count, double alpha, T *into);

FUNCTIONS_OF(float)
FUNCTIONS_OF(double)

#endif
