/* Each file of loops, once for every type of numbers. */
#include "codecs.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define OF(name) NAMED(name, T)

#define T float
#define KEY int32_t /* as wide */
#define MANTISSA 23
#define HALF 126 /* the exponent of 1/2 */
#define ONE 127
#include "columns.inc"
#include "four_bit.inc"
#include "top_k.inc"
#include "two_bit.inc"
#undef T
#undef KEY
#undef MANTISSA
#undef HALF
#undef ONE

#define T double
#define KEY int64_t
#define MANTISSA 52
#define HALF 1022
#define ONE 1023
#include "columns.inc"
#include "four_bit.inc"
#include "top_k.inc"
#include "two_bit.inc"
