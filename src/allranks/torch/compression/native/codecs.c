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
#include "columns.inc"
#include "top_k.inc"
#include "two_bit.inc"
#undef T
#undef KEY

#define T double
#define KEY int64_t
#include "columns.inc"
#include "top_k.inc"
#include "two_bit.inc"
