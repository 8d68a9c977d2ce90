/* Loops for the processor that is there. */
#ifndef ALLRANKS_CLONES_H
#define ALLRANKS_CLONES_H

/* Before a function: it is compiled for wide vectors too, and the library chooses when it is loaded.
 * Other compilers and processors take what the compiler makes of the loops. No processor changes a
 * bit: sums have as many lanes everywhere, and with `-ffp-contract=off` each operation is rounded. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(NO_CLONES)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif

#endif
