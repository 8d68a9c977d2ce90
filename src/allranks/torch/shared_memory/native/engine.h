/* What the parts of the library share. Only `engine.c` and `waiting.c` lock,
 * and only the second waits and looks at other processes. */
#ifndef ALLRANKS_ENGINE_H
#define ALLRANKS_ENGINE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "collectives.h"

#define LINE 64
#define SLOTS 8
#define SLOT_BYTES (128u << 10)
#define CACHE_BYTES (32u << 20) /* where the machine does not say */
#define PLANS 32
#define JOURNAL 64
#define SOON_NS 30000      /* whoever waits for a message by then needs no helper */
#define PATIENCE_NS 200000 /* for so long a wait offers the processor before it sleeps */
#define CHANNEL_BYTES (256u << 10) /* a power of two */
#define PORTION (32u << 10) /* told to the other rank as soon as it is copied: both copy at once */

/* Words that processes share are no locks of a process. */
_Static_assert(ATOMIC_INT_LOCK_FREE == 2 && ATOMIC_LLONG_LOCK_FREE == 2, "no atomics of 8 bytes");

/* A process sleeps on the bell of its own; whoever has published something rings it. */
typedef struct {
    _Atomic uint32_t rung;
    _Atomic uint32_t asleep; /* how many threads of the process sleep, or are about to */
} bell;

/* How far one rank is in one slot, and what it does there. Written by that rank alone. */
typedef struct {
    _Atomic uint64_t stage;
    uint64_t what, count;
    char pad[LINE - 24];
} phase;

/* What a rank has posted as collective `number` (from 1), in place number % JOURNAL. */
typedef struct {
    _Atomic uint64_t number; /* 0 while the line is written */
    _Atomic uint64_t what, count;
    char pad[LINE - 24];
} entry;

/* Stages of turn t of a slot. They only grow, across all turns: 4 t is where t may begin. */
enum { FREE = 0, ARRIVED = 1, SUMMED = 2, FINAL = 4 };

/* A ring of bytes from one rank to another: each line is written by one of them alone. */
typedef struct {
    _Atomic uint64_t written;
    char pad[LINE - 8];
    _Atomic uint64_t read;
    char pad2[LINE - 8];
} channel;

enum kind { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, BARRIER, PLANNED, SEND, RECEIVE };

struct op {
    op *next;       /* of its group, in the order of posting */
    group *group;
    plan *plan;
    int kind, type, how, peer; /* peer: the root, or the other rank of a message */
    const char *source;
    char *target;
    uint64_t count, item, tag;
    uint64_t number;               /* of its group's collectives, from 1 */
    uint64_t first, pieces, per_piece; /* pieces: turns of slots, `per_piece` elements in each */
    uint64_t entered, summed, over;    /* pieces */
    uint64_t moved;                    /* bytes of a message */
    bool in_two_rounds, past_caches, begun;
    _Atomic int state, holders;
};

/* A message that came before anybody asked for its tag, or that is coming. */
typedef struct message {
    struct message *next;
    char *bytes;
    uint64_t tag, size, came;
    int from;
    bool is_whole;
} message;

typedef struct {
    uint64_t tag, size, came;
    op *to;         /* who asked for it, or */
    message *kept;  /* where it is kept */
    bool is_open;
} incoming;

typedef struct peer {
    struct peer *next;
    int pid, handle, users;
    bool has_ended; /* heard by the helper */
    int64_t stopped_since_ns, stopped_seen_ns;
} peer;

struct group {
    group *next;
    engine *engine;
    char *segment;
    int rank, size;
    bool crowded;
    bell **bells;
    peer **peers;
    uint8_t *merges;
    phase *slots, *plans;
    entry *journal;
    channel *channels;
    char *data, *channel_data;
    uint64_t next_slot, next_plan, posted;
    op *first, *last;
    incoming *incoming;
    message *kept;
    _Atomic int failed;
    enum lost lost;
    int lost_rank;
    char failure[256];
};

struct plan {
    group *group;
    _Atomic int holders; /* whoever made it, and ops under way */
    int leaves, type;
    bool scatter;
    uint64_t count;
    char **leaf, **target, **shifted_leaf, **shifted_target;
    uint8_t *merges;
};

struct engine {
    pthread_mutex_t lock; /* over everything here but atomics; never held while asleep */
    pthread_t helper;
    bool has_helper, ends;
    _Atomic uint32_t helper_word; /* on which the helper sleeps: 1 while it does */
    _Atomic int drivers;
    _Atomic int64_t patience_ns; /* how long a wait offers the processor before it sleeps */
    _Atomic int sending; /* messages that have not left */
    _Atomic int timer;   /* which the helper hears: those are to go on; or -1 */
    _Atomic int64_t soon_ns; /* for so long it is set; longer where pushing was of no use */
    uint64_t parts; /* of messages, that have left so far */
    int active;
    int pid, forks; /* forks: of its ancestors, when it was made */
    int64_t looked_ns, stopped_ns;
    uint64_t cache_bytes;
    bell *bell;
    group *groups;
    peer *peers;
};

/* engine.c */
op *op_new(group *g, int kind);
op *op_post(op *o);
void group_ring(group *g, int rank);
void group_ring_all(group *g);
void group_fail(group *g, enum lost why, int rank, const char *text); /* or NULL */
bool group_is_here(const group *g);  /* and not in a child of the rank */
_Atomic uint32_t *group_left_word(const group *g, int rank);
bool group_collect(group *g);        /* takes out what is over */
bool group_advance(group *g);
bool engine_advance(engine *e);

/* waiting.c */
void *engine_help(void *of);
void engine_push_soon(engine *e); /* the helper goes on with messages that have not left */

/* collectives.c */
bool advance_collective(op *o);
bool waits_for(const op *o, int rank);
void write_journal(op *o);
bool contradicts(const op *o, int rank);

/* messages.c */
bool advance_messages(group *g);
void forget_messages(group *g);

static inline phase *phase_of(phase *of, int size, uint64_t slot, int rank)
{
    return of + slot * (uint64_t)size + (uint64_t)rank;
}

static inline channel *channel_of(const group *g, int from, int to)
{
    return g->channels + (uint64_t)from * (uint64_t)g->size + (uint64_t)to;
}

static inline char *channel_bytes(const group *g, int from, int to)
{
    return g->channel_data + ((uint64_t)from * (uint64_t)g->size + (uint64_t)to) * CHANNEL_BYTES;
}

#endif
