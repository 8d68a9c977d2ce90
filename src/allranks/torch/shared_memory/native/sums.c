/* Sums along one fixed tree. What is added is added in pairs, each rounded to its own type at once:
 * the same function of the same numbers, whatever the size, the alignment or who computes it.
 */
#include "sums.h"

#include <math.h>
#include <string.h>

#include "collectives.h"
#include "../../native/clones.h"

#if defined(__GNUC__) && !defined(__clang__)
#define SAME_INDEX _Pragma("GCC ivdep") /* where arrays overlap they are the same array */
#else
#define SAME_INDEX
#endif

const size_t item_bytes[TYPES] = {4, 8, 2, 2, 1, 1, 2, 4, 8};

static inline float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint16_t half) { return of_bits((uint32_t)half << 16); }

static inline uint16_t to_bfloat16(float value)
{
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return value != value ? 0x7fc0 : (uint16_t)rounded;
}

/* 5 bits of exponent moved under 8 by a multiplication, which is exact, subnormals too. */
static inline float from_float16(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    float value = of_bits(magnitude) * 0x1p112f;
    if (magnitude >= 0x7c00u << 13)
        value = of_bits(magnitude | 0x7f800000u);
    return of_bits(bits_of(value) | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t to_float16(float value)
{
    uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    /* 2^-24 is the last place of a subnormal: adding 1.5 * 2^(23-24) lets the addition round */
    uint32_t subnormal = bits_of(of_bits(magnitude) + 0.5f) - bits_of(0.5f);
    uint32_t half = magnitude < 113u << 23 ? subnormal : normal;
    if (magnitude >= 0x477ff000u) /* 65520: rounds beyond the largest */
        half = magnitude > 0x7f800000u ? 0x7e00 : 0x7c00;
    return (uint16_t)(half | (bits >> 16 & 0x8000));
}

#define SAME(value) (value)
#define PLUS(a, b) ((a) + (b))
#define TIMES(a, b) ((a) * (b))
#define GREATER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b)) /* not a number, once there, stays */
#define SMALLER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))

#define COMBINE(NAME, TYPE, WIDE, READ, WRITE, OPERATION)                                       \
    CLONES static void NAME(void *to, const void *left, const void *right, size_t count)       \
    {                                                                                           \
        TYPE *t = to;                                                                           \
        const TYPE *l = left, *r = right;                                                       \
        SAME_INDEX for (size_t i = 0; i < count; i++)                                           \
        {                                                                                       \
            WIDE a = READ(l[i]), b = READ(r[i]);                                                \
            t[i] = WRITE(OPERATION(a, b));                                                      \
        }                                                                                       \
    }
#define COMBINES(NAME, TYPE, WIDE, READ, WRITE)             \
    COMBINE(add_##NAME, TYPE, WIDE, READ, WRITE, PLUS)      \
    COMBINE(max_##NAME, TYPE, WIDE, READ, WRITE, GREATER)   \
    COMBINE(min_##NAME, TYPE, WIDE, READ, WRITE, SMALLER)   \
    COMBINE(times_##NAME, TYPE, WIDE, READ, WRITE, TIMES)   \
    static void divide_##NAME(void *values, size_t count, int by)       \
    {                                                                   \
        TYPE *v = values;                                               \
        for (size_t i = 0; i < count; i++) {                            \
            WIDE a = READ(v[i]);                                        \
            v[i] = WRITE((a / (WIDE)by));                               \
        }                                                               \
    }

/* Integers add and multiply as unsigned ones, which wrap around, as torch's do. */
#define WRAP(NAME, TYPE, UNSIGNED)                                                              \
    COMBINE(add_##NAME, UNSIGNED, uint64_t, SAME, (UNSIGNED)SAME, PLUS)                         \
    COMBINE(times_##NAME, UNSIGNED, uint64_t, SAME, (UNSIGNED)SAME, TIMES)                      \
    COMBINE(max_##NAME, TYPE, TYPE, SAME, SAME, GREATER)                                        \
    COMBINE(min_##NAME, TYPE, TYPE, SAME, SAME, SMALLER)                                        \
    static void divide_##NAME(void *values, size_t count, int by)                               \
    {                                                                                           \
        TYPE *v = values;                                                                       \
        for (size_t i = 0; i < count; i++)                                                      \
            v[i] = (TYPE)(v[i] / (int64_t)by);                                                  \
    }

COMBINES(float32, float, float, SAME, SAME)
COMBINES(float64, double, double, SAME, SAME)
COMBINES(float16, uint16_t, float, from_float16, to_float16)
COMBINES(bfloat16, uint16_t, float, from_bfloat16, to_bfloat16)
WRAP(int8, int8_t, uint8_t)
WRAP(uint8, uint8_t, uint8_t)
WRAP(int16, int16_t, uint16_t)
WRAP(int32, int32_t, uint32_t)
WRAP(int64, int64_t, uint64_t)

typedef void combine(void *to, const void *left, const void *right, size_t count);
typedef void division(void *values, size_t count, int by);

#define ROW(NAME) {add_##NAME, add_##NAME, max_##NAME, min_##NAME, times_##NAME}
static combine *const combines[TYPES][HOWS] = {
    ROW(float32), ROW(float64), ROW(float16), ROW(bfloat16), ROW(int8),
    ROW(uint8),   ROW(int16),   ROW(int32),   ROW(int64),
};
static division *const divisions[TYPES] = {
    divide_float32, divide_float64, divide_float16, divide_bfloat16, divide_int8,
    divide_uint8,   divide_int16,   divide_int32,   divide_int64,
};

#define BLOCK_BYTES 4096 /* of each leaf: all levels of a tree over 64 leaves fit in the first cache */

static void add_block(char *target, char *const *leaf, int leaves, const uint8_t *merges,
                      uint64_t offset, size_t count, combine *add)
{
    _Alignas(64) static _Thread_local char partial[DEEPEST][BLOCK_BYTES];
    const char *stack[DEEPEST];
    int depth = 0;
    for (int i = 0; i < leaves; i++) {
        stack[depth++] = leaf[i] + offset;
        for (int k = 0; k < merges[i]; k++) {
            depth--;
            bool is_last = i == leaves - 1 && k == merges[i] - 1;
            char *to = is_last ? target + offset : partial[depth - 1];
            add(to, stack[depth - 1], stack[depth], count);
            stack[depth - 1] = to;
        }
    }
}

void add_along_tree(char *target, char *const *leaf, int leaves, const uint8_t *merges,
                    uint64_t count, int type, int how, char *const *also, int others)
{
    size_t item = item_bytes[type], block = BLOCK_BYTES / item;
    combine *add = combines[type][how];
    for (uint64_t done = 0; done < count; done += block) {
        size_t now = count - done < block ? (size_t)(count - done) : block;
        uint64_t offset = done * item;
        if (leaves > 1)
            add_block(target, leaf, leaves, merges, offset, now, add);
        else if (target != leaf[0])
            memcpy(target + offset, leaf[0] + offset, now * item);
        if (how == MEAN)
            divisions[type](target + offset, now, leaves);
        for (int k = 0; k < others; k++)
            if (also[k] != target)
                memcpy(also[k] + offset, target + offset, now * item);
    }
}
