/* Sums of arrays along one fixed binary tree, element by element. */
#ifndef ALLRANKS_SUMS_H
#define ALLRANKS_SUMS_H

#include <stddef.h>
#include <stdint.h>

#define DEEPEST 64

extern const size_t item_bytes[];

/* `target` may be one of the leaves. After leaf i, `merges[i]` pairs of the tree are complete.
 * `also`: further targets, `others` of them, which may be leaves. */
void add_along_tree(char *target, char *const *leaf, int leaves, const uint8_t *merges,
                    uint64_t count, int type, int how, char *const *also, int others);

#endif
