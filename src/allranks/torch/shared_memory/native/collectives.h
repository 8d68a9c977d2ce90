/* Collectives between processes of one host, through memory that they share.
 *
 * A process has one `engine`; of each group of processes it is a member of it has one `group`, over
 * a segment of zeros that all members have mapped. Every call that communicates makes an `op`: a
 * state machine that goes on whenever somebody waits, in the order in which ops were posted. No
 * process ever writes what another writes, and none waits while it holds a lock that another
 * process could want: a process that is killed leaves nothing that has to be undone.
 *
 * C11 and Linux; knows neither Python nor torch.
 */
#ifndef ALLRANKS_COLLECTIVES_H
#define ALLRANKS_COLLECTIVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum type { FLOAT32, FLOAT64, FLOAT16, BFLOAT16, INT8, UINT8, INT16, INT32, INT64, TYPES };
enum how { SUM, MEAN, MAX, MIN, PRODUCT, HOWS };
enum state { UNDER_WAY, DONE, FAILED };
enum waited { IS_OVER, NOT_YET, INTERRUPTED };
enum lost { NOBODY, DIED, STOPPED, LEFT, CONTRADICTION };

#define MOST_RANKS 1024
#define ANY_RANK (-1)
#define BELL_BYTES 128

typedef struct engine engine;
typedef struct group group;
typedef struct op op;
typedef struct plan plan;

/* What a group is made of. All of it outlives the group. */
typedef struct {
    char *segment;           /* `segment_bytes(size)` of zeros, shared by all members */
    int rank, size;
    char *const *bells;      /* of every member, its own too: BELL_BYTES of zeros, shared */
    const int *pids;         /* of every member */
    const uint8_t *merges;   /* how many pairs of the tree are complete after each rank */
    bool crowded;            /* more ranks than processors: give way instead of spinning */
} membership;

/* A rank that is stopped for so long is lost; `cache_bytes`: of the largest cache, 0: the machine's. */
engine *engine_new(char *bell, double stopped_s, uint64_t cache_bytes);

void engine_free(engine *e);  /* once its groups are free and nobody waits */

uint64_t segment_bytes(int size);
group *group_new(engine *e, const membership *m);  /* NULL: no memory */
void group_leave(group *g);                        /* members that wait for this one hear of it */
void group_free(group *g);
const char *group_failure(group *g, enum lost *reason, int *rank);  /* "" if there is none */

/* Each returns a new op, which its caller releases, or NULL where there is no memory. All members
 * post the same collectives in the same order; memory stays as it is until the op is over.
 * What is taken is what is given (of a reduce-scatter and an all-gather the own part of it), or lies
 * apart from it. */
op *post_all_reduce(group *g, const void *source, void *target, uint64_t count, int type, int how);
op *post_reduce_scatter(group *g, const void *source, void *target, uint64_t count, int type,
                        int how);
op *post_all_gather(group *g, const void *source, void *target, uint64_t bytes);
op *post_broadcast(group *g, void *memory, uint64_t bytes, int root);
op *post_barrier(group *g);
op *post_send(group *g, const void *memory, uint64_t bytes, int to, uint64_t tag);
op *post_receive(group *g, void *memory, uint64_t bytes, int from, uint64_t tag);

/* A sum of leaves that lie in shared memory, in place: member r adds up chunk r of all leaves, along
 * the tree that `merges` says, and writes it to every target, or to its own (`scatter`, where
 * `count` is that of a chunk). All pointers are valid in this process. */
plan *plan_new(group *g, int leaves, char *const *leaf, const uint8_t *merges, char *const *target,
               uint64_t count, int type, bool scatter);
void plan_free(plan *p);
op *plan_start(plan *p);

enum state op_state(const op *o);
int op_source(const op *o);
/* Drives all ops of the process until this one is over, `seconds` have passed (< 0: never), a
 * signal came, or a tenth of a second is over (NOT_YET, so that the caller can look around). */
enum waited op_wait(op *o, double seconds);
void op_release(op *o);

#endif
