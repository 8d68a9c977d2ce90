/* The engine of a process: its groups, the ops that are under way in them, and what drives those.
 *
 * Whoever waits drives (`waiting.c`). Nobody waits with the lock held.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <linux/futex.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define PAGE 4096

static void futex_wake(_Atomic uint32_t *word, bool shared)
{
    syscall(SYS_futex, word, shared ? FUTEX_WAKE : FUTEX_WAKE_PRIVATE, 0x7fffffff, NULL, NULL, 0);
}

static void ring(bell *b)
{
    if (atomic_load_explicit(&b->asleep, memory_order_relaxed) == 0)
        return;
    atomic_fetch_add_explicit(&b->rung, 1, memory_order_seq_cst);
    futex_wake(&b->rung, true);
}

void group_ring(group *g, int rank) { ring(g->bells[rank]); }

/* Threads of this process that wait for the same group sleep on its own bell. */
void group_ring_all(group *g)
{
    for (int rank = 0; rank < g->size; rank++)
        ring(g->bells[rank]);
}

/* ---- engines and groups ---- */

/* A child of a process has its memory, and is nobody's rank: it leaves everything as it is. */
static _Atomic int forks;

static void count_fork(void) { atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

static bool is_own(const engine *e)
{
    return e->forks == atomic_load_explicit(&forks, memory_order_relaxed);
}

bool group_is_here(const group *g) { return is_own(g->engine); }

/* Of the cache that cores share. The C library's own answer counts all of a machine's together. */
static uint64_t last_cache_bytes(void)
{
    FILE *file = fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "re");
    unsigned long long kilobytes = 0;
    if (file != NULL) {
        if (fscanf(file, "%lluK", &kilobytes) != 1)
            kilobytes = 0;
        fclose(file);
    }
    return kilobytes > 0 ? kilobytes << 10 : CACHE_BYTES;
}

engine *engine_new(char *memory, double stopped_s, uint64_t cache_bytes)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    engine *e = calloc(1, sizeof *e);
    if (e == NULL)
        return NULL;
    pthread_once(&once, watch_forks);
    e->forks = atomic_load_explicit(&forks, memory_order_relaxed);
    pthread_mutex_init(&e->lock, NULL);
    e->bell = (bell *)memory;
    e->stopped_ns = (int64_t)(stopped_s * 1e9);
    e->cache_bytes = cache_bytes > 0 ? cache_bytes : last_cache_bytes();
    atomic_init(&e->patience_ns, PATIENCE_NS);
    atomic_init(&e->timer, timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
    e->pid = getpid();
    return e;
}

void engine_free(engine *e)
{
    if (e->has_helper && is_own(e)) {
        pthread_mutex_lock(&e->lock);
        e->ends = true;
        pthread_mutex_unlock(&e->lock);
        atomic_store(&e->helper_word, 0);
        futex_wake(&e->helper_word, false);
        pthread_join(e->helper, NULL);
    }
    int timer = atomic_load(&e->timer);
    struct itimerspec at; /* else the program has closed it, and the number stands for something else */
    if (timer >= 0 && is_own(e) && timerfd_gettime(timer, &at) == 0)
        close(timer);
    pthread_mutex_destroy(&e->lock);
    free(e);
}

static uint64_t pages(uint64_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static uint64_t lines_bytes(int size) { return pages((uint64_t)size * LINE); }

uint64_t segment_bytes(int size)
{
    uint64_t n = (uint64_t)size;
    return lines_bytes(size) + pages(SLOTS * n * sizeof(phase)) + pages(PLANS * n * sizeof(phase)) +
           pages(JOURNAL * n * sizeof(entry)) + pages(n * n * sizeof(channel)) +
           SLOTS * n * SLOT_BYTES + n * n * CHANNEL_BYTES;
}

/* The first page of a segment: a line for each rank, whose first word says that it makes no more
 * calls, and because of whom: `enum lost` times MOST_RANKS, and the rank that was lost. */
_Atomic uint32_t *group_left_word(const group *g, int rank)
{
    return (_Atomic uint32_t *)(g->segment + (size_t)rank * LINE);
}

static peer *peer_of(engine *e, int pid)
{
    for (peer *p = e->peers; p != NULL; p = p->next)
        if (p->pid == pid) {
            p->users++;
            return p;
        }
    peer *p = calloc(1, sizeof *p);
    if (p == NULL)
        return NULL;
    p->pid = pid, p->users = 1, p->next = e->peers;
#ifdef SYS_pidfd_open
    p->handle = pid == e->pid ? -1 : (int)syscall(SYS_pidfd_open, pid, 0);
#else
    p->handle = -1;
#endif
    return e->peers = p;
}

static void peer_release(engine *e, peer *of)
{
    if (of == NULL || --of->users > 0)
        return;
    for (peer **at = &e->peers; *at != NULL; at = &(*at)->next)
        if (*at == of) {
            *at = of->next;
            break;
        }
    if (of->handle >= 0)
        close(of->handle);
    free(of);
}

static void lay_out(group *g)
{
    uint64_t n = (uint64_t)g->size;
    char *at = g->segment + lines_bytes(g->size);
    g->slots = (phase *)at, at += pages(SLOTS * n * sizeof(phase));
    g->plans = (phase *)at, at += pages(PLANS * n * sizeof(phase));
    g->journal = (entry *)at, at += pages(JOURNAL * n * sizeof(entry));
    g->channels = (channel *)at, at += pages(n * n * sizeof(channel));
    g->data = at, at += SLOTS * n * SLOT_BYTES;
    g->channel_data = at;
}

group *group_new(engine *e, const membership *m)
{
    group *g = calloc(1, sizeof *g);
    size_t n = (size_t)m->size;
    if (g == NULL)
        return NULL;
    g->engine = e, g->segment = m->segment, g->rank = m->rank, g->size = m->size;
    g->crowded = m->crowded;
    g->bells = malloc(n * sizeof *g->bells);
    g->peers = calloc(n, sizeof *g->peers);
    g->merges = malloc(n);
    g->incoming = calloc(n, sizeof *g->incoming);
    if (!g->bells || !g->peers || !g->merges || !g->incoming) {
        group_free(g);
        return NULL;
    }
    memcpy(g->bells, m->bells, n * sizeof *g->bells);
    memcpy(g->merges, m->merges, n);
    lay_out(g);
    pthread_mutex_lock(&e->lock);
    bool is_whole = true;
    for (size_t i = 0; i < n; i++)
        is_whole &= (g->peers[i] = peer_of(e, m->pids[i])) != NULL;
    g->next = e->groups, e->groups = g;
    pthread_mutex_unlock(&e->lock);
    if (is_whole)
        return g;
    group_free(g);
    return NULL;
}

void group_leave(group *g)
{
    if (!group_is_here(g))
        return;
    pthread_mutex_lock(&g->engine->lock);
    group_fail(g, LEFT, g->rank, NULL);
    group_collect(g);
    pthread_mutex_unlock(&g->engine->lock);
}

void group_free(group *g)
{
    engine *e = g->engine;
    if (group_is_here(g)) {
        pthread_mutex_lock(&e->lock);
        for (group **at = &e->groups; *at != NULL; at = &(*at)->next)
            if (*at == g) {
                *at = g->next;
                break;
            }
        for (int i = 0; g->peers != NULL && i < g->size; i++)
            peer_release(e, g->peers[i]);
        group_fail(g, LEFT, g->rank, NULL);
        group_collect(g);
        pthread_mutex_unlock(&e->lock);
    }
    forget_messages(g);
    free(g->bells);
    free(g->peers);
    free(g->merges);
    free(g->incoming);
    free(g);
}

const char *group_failure(group *g, enum lost *reason, int *rank)
{
    *reason = NOBODY, *rank = -1;
    if (atomic_load_explicit(&g->failed, memory_order_acquire) == 0)
        return "";
    *reason = g->lost, *rank = g->lost_rank;
    return g->failure;
}

/* ---- plans ---- */

plan *plan_new(group *g, int leaves, char *const *leaf, const uint8_t *merges, char *const *target,
               uint64_t count, int type, bool scatter)
{
    plan *p = calloc(1, sizeof *p);
    size_t n = (size_t)leaves, size = (size_t)g->size;
    if (p == NULL)
        return NULL;
    atomic_init(&p->holders, 1);
    p->group = g, p->leaves = leaves, p->count = count, p->type = type, p->scatter = scatter;
    p->leaf = malloc(n * sizeof *leaf), p->shifted_leaf = malloc(n * sizeof *leaf);
    p->target = malloc(size * sizeof *leaf), p->shifted_target = malloc(size * sizeof *leaf);
    p->merges = malloc(n);
    if (!p->leaf || !p->shifted_leaf || !p->target || !p->shifted_target || !p->merges) {
        plan_free(p);
        return NULL;
    }
    memcpy(p->leaf, leaf, n * sizeof *leaf);
    memcpy(p->target, target, size * sizeof *leaf);
    memcpy(p->merges, merges, n);
    return p;
}

void plan_free(plan *p)
{
    if (atomic_fetch_sub_explicit(&p->holders, 1, memory_order_acq_rel) > 1)
        return;
    free(p->leaf);
    free(p->shifted_leaf);
    free(p->target);
    free(p->shifted_target);
    free(p->merges);
    free(p);
}

/* ---- ops ---- */

op *op_new(group *g, int kind)
{
    op *o = calloc(1, sizeof *o);
    if (o == NULL)
        return NULL;
    o->group = g, o->kind = kind, o->item = 1;
    atomic_init(&o->holders, 2); /* the engine, and whoever posts */
    return o;
}

void op_release(op *o)
{
    if (atomic_fetch_sub_explicit(&o->holders, 1, memory_order_acq_rel) > 1)
        return;
    if (o->plan != NULL)
        plan_free(o->plan);
    free(o);
}

enum state op_state(const op *o)
{
    return (enum state)atomic_load_explicit(&o->state, memory_order_acquire);
}

int op_source(const op *o) { return o->peer; }

static const char *const said[] = {
    [DIED] = "died (its process has ended)",
    [STOPPED] = "is stopped (by SIGSTOP or SIGTSTP)",
    [LEFT] = "has left the group",
    [CONTRADICTION] = "makes another call than the others, or one of another size or type",
};

/* The group can do nothing more: all its ops fail with it. Whoever waits for this rank hears why. */
void group_fail(group *g, enum lost why, int rank, const char *text)
{
    if (atomic_load_explicit(&g->failed, memory_order_relaxed))
        return;
    g->lost = why, g->lost_rank = rank;
    snprintf(g->failure, sizeof g->failure, "rank %d of %d %s", rank, g->size,
             text != NULL ? text : said[why]);
    atomic_store_explicit(&g->failed, 1, memory_order_release);
    for (op *o = g->first; o != NULL; o = o->next)
        if (op_state(o) == UNDER_WAY)
            atomic_store_explicit(&o->state, FAILED, memory_order_release);
    if (!group_is_here(g))
        return;
    uint32_t word = (uint32_t)why * MOST_RANKS + (uint32_t)rank;
    atomic_store_explicit(group_left_word(g, g->rank), word, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    group_ring_all(g);
}

/* Take the ops that are over off the list of their group; whether there were any. */
bool group_collect(group *g)
{
    bool any = false;
    g->last = NULL;
    for (op **at = &g->first; *at != NULL;) {
        op *o = *at;
        if (op_state(o) == UNDER_WAY) {
            g->last = o, at = &o->next;
            continue;
        }
        *at = o->next;
        g->engine->active--;
        if (o->kind == SEND)
            atomic_fetch_sub_explicit(&g->engine->sending, 1, memory_order_relaxed);
        op_release(o);
        any = true;
    }
    return any;
}

bool group_advance(group *g)
{
    bool moved = false, has_messages = g->kept != NULL;
    for (op *o = g->first; o != NULL; o = o->next) {
        if (atomic_load_explicit(&g->failed, memory_order_relaxed))
            break;
        if (o->kind == SEND || o->kind == RECEIVE) {
            has_messages = true;
            continue;
        }
        moved |= advance_collective(o);
        if (o->over == o->pieces && op_state(o) == UNDER_WAY)
            atomic_store_explicit(&o->state, DONE, memory_order_release);
    }
    if (has_messages && !atomic_load_explicit(&g->failed, memory_order_relaxed))
        moved |= advance_messages(g);
    if (group_collect(g)) { /* another thread may wait for one of them */
        moved = true;
        atomic_thread_fence(memory_order_seq_cst);
        ring(g->engine->bell);
    }
    return moved;
}

/* Drive all ops of the process; the lock is held. */
bool engine_advance(engine *e)
{
    bool moved = false;
    for (group *g = e->groups; g != NULL; g = g->next)
        if (g->first != NULL)
            moved |= group_advance(g);
    return moved;
}

static void wake_helper(engine *e)
{
    if (!e->has_helper) {
        sigset_t all, before;
        sigfillset(&all); /* signals are for the threads of the program */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        e->has_helper = pthread_create(&e->helper, NULL, engine_help, e) == 0;
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    } else if (atomic_load_explicit(&e->helper_word, memory_order_relaxed)) {
        atomic_store(&e->helper_word, 0);
        futex_wake(&e->helper_word, false);
    }
}

op *op_post(op *o)
{
    group *g = o->group;
    engine *e = g->engine;
    if (!group_is_here(g)) { /* in a child of the rank, where the lock may be held for good */
        group_fail(g, LEFT, g->rank, NULL);
        atomic_store_explicit(&o->state, FAILED, memory_order_release);
        op_release(o);
        return o;
    }
    pthread_mutex_lock(&e->lock);
    if (atomic_load_explicit(&g->failed, memory_order_relaxed)) {
        atomic_store_explicit(&o->state, FAILED, memory_order_release);
        pthread_mutex_unlock(&e->lock);
        op_release(o);
        return o;
    }
    if (o->kind != SEND && o->kind != RECEIVE) {
        o->number = ++g->posted;
        write_journal(o);
    }
    if (o->kind == PLANNED)
        o->first = g->next_plan, g->next_plan += o->pieces;
    else if (o->kind != SEND && o->kind != RECEIVE)
        o->first = g->next_slot, g->next_slot += o->pieces;
    if (g->last == NULL)
        g->first = o;
    else
        g->last->next = o;
    g->last = o;
    e->active++;
    if (o->kind == SEND)
        atomic_fetch_add_explicit(&e->sending, 1, memory_order_relaxed);
    bool moved = group_advance(g);
    if (o->kind == SEND) { /* as much of it as a channel holds, a part at a time */
        atomic_store_explicit(&e->soon_ns, SOON_NS, memory_order_relaxed);
        for (uint32_t n = PORTION; n < CHANNEL_BYTES && moved && op_state(o) == UNDER_WAY; n += PORTION)
            moved = group_advance(g);
    }
    if (g->first != NULL)
        wake_helper(e);
    if (o->kind == SEND && op_state(o) == UNDER_WAY)
        engine_push_soon(e);
    pthread_mutex_unlock(&e->lock);
    return o;
}
