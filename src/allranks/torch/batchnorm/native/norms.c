/* The loops, once for every type of numbers. */
#include "norms.h"

#include <math.h>

#define LANES 16
#define TOGETHER 8 /* channels whose rows are passed as they lie */
#define BLOCK 1024 /* so many values are summed in `T`, and these sums in double */

#define JOINED(a, b) a##_##b
#define NAMED(a, b) JOINED(a, b)
#define OF(name) NAMED(name, T)

#define T float
#include "norms.inc"
#undef T

#define T double
#include "norms.inc"
