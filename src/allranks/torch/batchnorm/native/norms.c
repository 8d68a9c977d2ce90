/* The loops, once for every type of numbers. */
#include "norms.h"

#include <math.h>

#define WIDTH 32      /* bytes that are added at once */
#define TOGETHER 8    /* channels whose rows are passed as they lie */
#define BLOCK 1024    /* so many values are summed in `T`, and these sums in double */

/* Else it would be compiled once, for the least processor of all. */
#define INLINE inline __attribute__((always_inline))

#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define OF(name) NAMED(name, T)

#define T float
#include "norms.inc"
#undef T

#define T double
#include "norms.inc"
