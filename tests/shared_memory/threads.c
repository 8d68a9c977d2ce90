/* Ranks as threads of one process, each with an engine of its own, for the sanitizers: they see races
 * between ranks only inside one process. Two threads of each rank call at once: one in the group of
 * all, one in that of its half; both also send and receive. Every call has random size, kind and
 * values that any rank can compute, several are in flight, and are waited for in another order.
 *
 *     threads RANKS CALLS SEED
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "collectives.h"

#define MOST 8
#define IN_FLIGHT 4
#define MOST_NUMBERS 20000
#define PLAN_NUMBERS 3000
#define LITTLE 64 /* bytes of cache: nearly all outgrows it */

static int ranks, calls;
static uint64_t seed;
static char *bells[MOST];
static engine *engines[MOST];
static int32_t *leaves[3][MOST];

typedef struct {
    group *group;
    char *segment;
    plan *plan;
    int number, rank, size; /* 0: of all; 1 and 2: of halves */
} member;

typedef struct {
    op *op;
    int kind, call, rank, size, group, root;
    uint64_t count;
    int32_t *source, *target;
} pending;

static member members[MOST][2];

#define MUST(what)                                                      \
    do {                                                                \
        if (!(what)) {                                                  \
            fprintf(stderr, "line %d: not %s\n", __LINE__, #what);      \
            abort();                                                    \
        }                                                               \
    } while (0)

static uint64_t mixed(uint64_t x)
{
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* What a rank gives in a call: element i. */
static int32_t value(int group, int call, int rank, uint64_t i)
{
    return (int32_t)mixed(seed ^ (uint64_t)group << 60 ^ (uint64_t)call << 36 ^
                          (uint64_t)rank << 30 ^ i);
}

static int32_t sum_of(const pending *p, uint64_t i)
{
    uint32_t sum = 0;
    for (int rank = 0; rank < p->size; rank++)
        sum += (uint32_t)value(p->group, p->call, rank, i);
    return (int32_t)sum;
}

enum { REDUCE, SCATTER, GATHER, SPREAD, MEET, IN_PLACE, PASS, KINDS };

static void post(pending *p, const member *m)
{
    group *g = m->group;
    uint64_t n = p->count, most = n * (uint64_t)m->size + 1;
    p->source = malloc(most * 4), p->target = malloc(most * 4);
    MUST(p->source && p->target);
    uint64_t given = p->kind == SCATTER ? n * (uint64_t)m->size : n;
    for (uint64_t i = 0; i < given; i++)
        p->source[i] = value(p->group, p->call, m->rank, i);
    switch (p->kind) {
    case REDUCE:
        p->op = post_all_reduce(g, p->source, p->target, n, INT32, SUM);
        break;
    case SCATTER:
        p->op = post_reduce_scatter(g, p->source, p->target, n, INT32, SUM);
        break;
    case GATHER:
        p->op = post_all_gather(g, p->source, p->target, n * 4);
        break;
    case SPREAD:
        p->op = post_broadcast(g, m->rank == p->root ? p->source : p->target, n * 4, p->root);
        break;
    case MEET:
        p->op = post_barrier(g);
        break;
    case IN_PLACE:
        for (int i = 0; i < PLAN_NUMBERS; i++)
            leaves[m->number][m->rank][i] = value(p->group, p->call, m->rank, (uint64_t)i);
        p->op = plan_start(m->plan);
        break;
    }
    MUST(p->op != NULL);
}

static void finish(op *o)
{
    while (op_wait(o, -1) != IS_OVER)
        ;
    MUST(op_state(o) == DONE);
    op_release(o);
}

static void check(pending *p, const member *m)
{
    finish(p->op);
    uint64_t n = p->count;
    for (uint64_t i = 0; i < n && p->kind == REDUCE; i++)
        MUST(p->target[i] == sum_of(p, i));
    for (uint64_t i = 0; i < n && p->kind == SCATTER; i++)
        MUST(p->target[i] == sum_of(p, (uint64_t)m->rank * n + i));
    for (uint64_t i = 0; i < n && p->kind == SPREAD && m->rank != p->root; i++)
        MUST(p->target[i] == value(p->group, p->call, p->root, i));
    for (int rank = 0; rank < p->size && p->kind == GATHER; rank++)
        for (uint64_t i = 0; i < n; i++)
            MUST(p->target[(uint64_t)rank * n + i] == value(p->group, p->call, rank, i));
    for (uint64_t i = 0; i < PLAN_NUMBERS && p->kind == IN_PLACE; i++)
        MUST(leaves[m->number][m->rank][i] == sum_of(p, i));
    free(p->source);
    free(p->target);
}

/* Everyone sends three messages to the next one, who asks for them in another order. */
static void pass_on(const member *m, int call, uint64_t n)
{
    int to = (m->rank + 1) % m->size, from = (m->rank + m->size - 1) % m->size;
    op *out[3], *in[3];
    int32_t *sent[3], *got[3];
    for (int k = 0; k < 3; k++) {
        sent[k] = malloc(n * 4 + 1), got[k] = malloc(n * 4 + 1);
        for (uint64_t i = 0; i < n; i++)
            sent[k][i] = value(m->number, call, m->rank, i + ((uint64_t)k << 25));
        out[k] = post_send(m->group, sent[k], n * 4, to, (uint64_t)k);
        MUST(out[k] != NULL);
    }
    for (int j = 0; j < 3; j++) {
        int k = (j + call) % 3;
        in[k] = post_receive(m->group, got[k], n * 4, call % 2 ? from : ANY_RANK, (uint64_t)k);
        MUST(in[k] != NULL);
        if (call % 5 == 0)
            usleep(10);
    }
    for (int k = 2; k >= 0; k--)
        finish(in[k]);
    for (int k = 0; k < 3; k++) {
        finish(out[k]);
        for (uint64_t i = 0; i < n; i++)
            MUST(got[k][i] == value(m->number, call, from, i + ((uint64_t)k << 25)));
        free(sent[k]);
        free(got[k]);
    }
}

static uint64_t size_of(uint64_t random)
{
    switch (random % 4) {
    case 0:
        return random / 4 % 8;
    case 1:
        return random / 4 % 3000;
    default:
        return random / 4 % (random % 16 == 2 ? MOST_NUMBERS * 6 : MOST_NUMBERS / 4);
    }
}

static void *run(void *of)
{
    const member *m = of;
    pending ahead[IN_FLIGHT];
    int waiting = 0, in_place = 0;
    for (int call = 0; call < calls; call++) {
        uint64_t random = mixed(seed + (uint64_t)call * 3 + (uint64_t)m->number);
        pending p = {.kind = (int)(random % KINDS), .call = call, .rank = m->rank, .size = m->size};
        p.group = m->number, p.count = size_of(random >> 8), p.root = (int)(random >> 4) % m->size;
        p.root = p.root < 0 ? 0 : p.root;
        if (p.kind == PASS) {
            pass_on(m, call, p.count);
            continue;
        }
        if (p.kind == IN_PLACE && in_place++ > 0) /* its leaves may be in use */
            while (waiting > 0)
                check(&ahead[--waiting], m);
        post(&p, m);
        ahead[waiting++] = p;
        while (waiting == IN_FLIGHT || (waiting > 0 && random >> 40 & 1)) {
            int first = (int)(mixed(random ^ (uint64_t)m->rank) % (uint64_t)waiting);
            check(&ahead[first], m);
            ahead[first] = ahead[--waiting];
        }
    }
    while (waiting > 0)
        check(&ahead[--waiting], m);
    return NULL;
}

static char *zeros(uint64_t bytes)
{
    char *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    MUST(at != MAP_FAILED);
    return at;
}

/* The group `number` of world ranks first, first + step, ... */
static void make_group(int number, int first, int step)
{
    int size = (ranks - first + step - 1) / step, pids[MOST];
    char *segment = zeros(segment_bytes(size)), *own[MOST], *leaf[MOST];
    uint8_t merges[MOST];
    for (int i = 0; i < size; i++) {
        pids[i] = getpid(), own[i] = bells[first + i * step];
        leaf[i] = (char *)leaves[number][i];
        merges[i] = 0; /* as many pairs as i + 1 has zeros at its end, and what is left at the last */
        for (int k = i + 1; k % 2 == 0; k /= 2)
            merges[i]++;
    }
    merges[size - 1] = (uint8_t)(size - 1);
    for (int i = 0; i < size - 1; i++)
        merges[size - 1] = (uint8_t)(merges[size - 1] - merges[i]);
    for (int i = 0; i < size; i++) {
        member *m = &members[first + i * step][number > 0];
        membership of = {segment, i, size, own, pids, merges, ranks > 2};
        *m = (member){group_new(engines[first + i * step], &of), segment, NULL, number, i, size};
        MUST(m->group != NULL);
        m->plan = plan_new(m->group, size, leaf, merges, leaf, PLAN_NUMBERS, INT32, false);
        MUST(m->plan != NULL);
    }
}

int main(int argc, char **argv)
{
    MUST(argc == 4);
    ranks = atoi(argv[1]), calls = atoi(argv[2]), seed = mixed((uint64_t)atoi(argv[3]));
    MUST(ranks >= 2 && ranks <= MOST);
    for (int rank = 0; rank < ranks; rank++) {
        bells[rank] = zeros(BELL_BYTES), engines[rank] = engine_new(bells[rank], 0.5, rank % 2 * LITTLE);
        for (int number = 0; number < 3; number++)
            leaves[number][rank] = (int32_t *)zeros(PLAN_NUMBERS * 4);
    }
    make_group(0, 0, 1);
    make_group(1, 0, 2);
    make_group(2, 1, 2);
    pthread_t threads[MOST][2];
    for (int rank = 0; rank < ranks; rank++)
        for (int which = 0; which < 2; which++)
            MUST(pthread_create(&threads[rank][which], NULL, run, &members[rank][which]) == 0);
    for (int rank = 0; rank < ranks; rank++)
        for (int which = 0; which < 2; which++)
            pthread_join(threads[rank][which], NULL);
    for (int rank = 0; rank < ranks; rank++) {
        for (int which = 0; which < 2; which++) {
            plan_free(members[rank][which].plan);
            group_leave(members[rank][which].group);
            group_free(members[rank][which].group);
        }
        engine_free(engines[rank]);
    }
    puts("equal");
    return 0;
}
