/* The engine of a process: it drives all ops, sleeps until others have gone on, and looks after them.
 *
 * Whoever waits drives. Nobody waits with the lock held. Before a thread sleeps it says so on its
 * bell, and drives once more; whoever publishes something does so first, and looks then whether
 * somebody sleeps: of the two at least one sees the other. A helper thread drives what nobody waits
 * for, now and then: one for the process.
 */
#define _GNU_SOURCE
#include "engine.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096
#define TICK_NS 100000000  /* how long a sleep lasts before the others are looked at */
#define SPINS 256          /* looks at once, before the processor is offered to others */
#define PATIENCE_NS 200000 /* for so long it is offered, before a sleep, which costs two switches */
#define IMPATIENCE_NS 5000 /* at least: where waits last longer than that anyway, nothing is gained */
#define HELP_NS 5000000    /* how often the helper looks */
#define IDLE_TURNS 20      /* after so many turns without an op it sleeps for good */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static long futex_wait(_Atomic uint32_t *word, uint32_t value, int64_t ns, bool shared)
{
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    return syscall(SYS_futex, word, shared ? FUTEX_WAIT : FUTEX_WAIT_PRIVATE, value, &t, NULL, 0);
}

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

static bool collect(group *g);

/* ---- engines and groups ---- */

/* A child of a process has its memory, and is nobody's rank: it leaves everything as it is. */
static _Atomic int forks;

static void count_fork(void) { atomic_fetch_add_explicit(&forks, 1, memory_order_relaxed); }

static void watch_forks(void) { pthread_atfork(NULL, NULL, count_fork); }

static bool is_own(const engine *e)
{
    return e->forks == atomic_load_explicit(&forks, memory_order_relaxed);
}

static bool is_here(const group *g) { return is_own(g->engine); }

engine *engine_new(char *memory, double stopped_s)
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
    atomic_init(&e->patience_ns, PATIENCE_NS);
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
static _Atomic uint32_t *left_word(const group *g, int rank)
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
    if (!is_here(g))
        return;
    pthread_mutex_lock(&g->engine->lock);
    group_fail(g, LEFT, g->rank, NULL);
    collect(g);
    pthread_mutex_unlock(&g->engine->lock);
}

void group_free(group *g)
{
    engine *e = g->engine;
    if (is_here(g)) {
        pthread_mutex_lock(&e->lock);
        for (group **at = &e->groups; *at != NULL; at = &(*at)->next)
            if (*at == g) {
                *at = g->next;
                break;
            }
        for (int i = 0; g->peers != NULL && i < g->size; i++)
            peer_release(e, g->peers[i]);
        group_fail(g, LEFT, g->rank, NULL);
        collect(g);
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
    if (!is_here(g))
        return;
    uint32_t word = (uint32_t)why * MOST_RANKS + (uint32_t)rank;
    atomic_store_explicit(left_word(g, g->rank), word, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    group_ring_all(g);
}

/* Take the ops that are over off the list of their group; whether there were any. */
static bool collect(group *g)
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
        op_release(o);
        any = true;
    }
    return any;
}

static bool advance(group *g)
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
    if (collect(g)) { /* another thread may wait for one of them */
        moved = true;
        atomic_thread_fence(memory_order_seq_cst);
        ring(g->engine->bell);
    }
    return moved;
}

/* Drive all ops of the process; the lock is held. */
static bool advance_all(engine *e)
{
    bool moved = false;
    for (group *g = e->groups; g != NULL; g = g->next)
        if (g->first != NULL)
            moved |= advance(g);
    return moved;
}

static void *help(void *of);

static void wake_helper(engine *e)
{
    if (!e->has_helper) {
        sigset_t all, before;
        sigfillset(&all); /* signals are for the threads of the program */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        e->has_helper = pthread_create(&e->helper, NULL, help, e) == 0;
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
    if (!is_here(g)) { /* in a child of the rank, where the lock may be held for good */
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
    advance(g);
    if (g->first != NULL)
        wake_helper(e);
    pthread_mutex_unlock(&e->lock);
    return o;
}

/* ---- looking after the others ---- */

/* The letter after the name, which may hold parentheses itself: T is stopped, t held by a debugger, Z
 * has ended, and nobody asked how; 0 where nothing can be read. */
static char letter_of(int pid)
{
    char path[64], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return 0;
    ssize_t got = read(file, text, sizeof text - 1);
    close(file);
    if (got <= 0)
        return 0;
    text[got] = 0;
    char *end = strrchr(text, ')');
    return end != NULL && end[1] == ' ' ? end[2] : 0;
}

/* Without a handle (an old kernel, a sandbox, no descriptor left) the process id has to do. */
static bool has_died(const peer *p, char letter)
{
    if (p->handle < 0)
        return letter == 'Z' || letter == 'X' || (kill(p->pid, 0) != 0 && errno == ESRCH);
    struct pollfd ended = {p->handle, POLLIN, 0};
    return poll(&ended, 1, 0) > 0;
}

static enum lost look_at(peer *p, const engine *e)
{
    if (p->pid == e->pid)
        return NOBODY;
    char letter = letter_of(p->pid);
    if (has_died(p, letter))
        return DIED;
    if (letter != 'T') {
        p->stopped_since_ns = 0;
        return NOBODY;
    }
    int64_t now = now_ns();
    if (p->stopped_since_ns == 0 || now - p->stopped_seen_ns > 2 * TICK_NS)
        p->stopped_since_ns = now; /* nobody looked meanwhile: it may have run */
    p->stopped_seen_ns = now;
    return now - p->stopped_since_ns >= e->stopped_ns ? STOPPED : NOBODY;
}

/* `by_name`: receives from any rank wait for nobody in particular. */
static bool is_waited_for(const group *g, int rank, bool by_name)
{
    for (const op *o = g->first; o != NULL; o = o->next)
        if (op_state(o) == UNDER_WAY && !(by_name && o->peer == ANY_RANK && o->kind == RECEIVE) &&
            waits_for(o, rank))
            return true;
    return false;
}

/* What is known of a rank: that its process is gone or stopped, or what it said itself. */
static enum lost known_of(const group *g, int rank, bool closely, int *whom)
{
    *whom = rank;
    if (rank == g->rank)
        return NOBODY;
    enum lost lost = NOBODY;
    if (closely && is_waited_for(g, rank, false))
        lost = look_at(g->peers[rank], g->engine);
    uint32_t word = atomic_load_explicit(left_word(g, rank), memory_order_acquire);
    if (word == 0) /* who has left may end */
        return lost;
    *whom = (int)(word % MOST_RANKS);
    return (enum lost)(word / MOST_RANKS);
}

/* Whether ranks that wait for each other wait in different collectives. */
static bool look_for_contradictions(group *g)
{
    for (op *o = g->first; o != NULL; o = o->next)
        for (int rank = 0; o->number > 0 && rank < g->size; rank++)
            if (op_state(o) == UNDER_WAY && waits_for(o, rank) && contradicts(o, rank)) {
                collect(g);
                return true;
            }
    return false;
}

/* A group fails if one of its ops waits for a rank that will not come. What that one had published
 * before was taken first: its state is read before the last look at what it has done. Who leaves
 * when his work is done fails no receive from any rank, but the last one does. */
static bool look_after(group *g, bool closely)
{
    enum lost lost[MOST_RANKS];
    int whom[MOST_RANKS], left = 0;
    bool any = false;
    for (int rank = 0; rank < g->size; rank++) {
        lost[rank] = known_of(g, rank, closely, &whom[rank]);
        left += lost[rank] == LEFT;
        any |= lost[rank] != NOBODY;
    }
    if (!any)
        return false;
    bool moved = advance(g);
    static const enum lost order[] = {DIED, STOPPED, CONTRADICTION, LEFT}; /* causes first */
    for (int k = 0; k < 4; k++)
        for (int rank = 0; rank < g->size; rank++) {
            bool by_name = order[k] == LEFT && left < g->size - 1;
            if (lost[rank] == order[k] && is_waited_for(g, rank, by_name)) {
                if (order[k] == CONTRADICTION && look_for_contradictions(g))
                    return true; /* in words of its own */
                group_fail(g, order[k], whom[rank], NULL);
                collect(g);
                return true;
            }
        }
    return moved;
}

static bool look_after_all(engine *e, bool closely)
{
    bool moved = false;
    if (closely) {
        int64_t now = now_ns();
        if (now - e->looked_ns < TICK_NS / 2)
            return false;
        e->looked_ns = now;
    }
    for (group *g = e->groups; g != NULL; g = g->next)
        if (g->first != NULL)
            moved |= look_after(g, closely) || (closely && look_for_contradictions(g));
    return moved;
}

/* ---- waiting ---- */

/* Sleep until something was published, or this op is over, or for so long. Another thread may have
 * ended the op before this one was counted as asleep, and rung for nobody: so it is looked at, too. */
static long sleep_on(const op *o, int64_t ns)
{
    engine *e = o->group->engine;
    bell *b = e->bell;
    uint32_t rung = atomic_load_explicit(&b->rung, memory_order_acquire);
    atomic_fetch_add_explicit(&b->asleep, 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    pthread_mutex_lock(&e->lock);
    bool moved = advance_all(e) || look_after_all(e, false);
    pthread_mutex_unlock(&e->lock);
    long slept = 0;
    if (!moved && op_state(o) == UNDER_WAY)
        slept = futex_wait(&b->rung, rung, ns, true) != 0 ? errno : 0;
    atomic_fetch_sub_explicit(&b->asleep, 1, memory_order_seq_cst);
    return slept;
}

/* Look again and again; whether the op is over. Another rank may need this very processor. */
static bool try_for_a_while(op *o, int64_t until)
{
    engine *e = o->group->engine;
    for (int turn = o->group->crowded ? SPINS : 0;; turn++) {
        pthread_mutex_lock(&e->lock);
        bool moved = advance_all(e);
        pthread_mutex_unlock(&e->lock);
        if (op_state(o) != UNDER_WAY)
            return true;
        if (moved)
            continue;
        if (turn < SPINS) {
            relax();
            continue;
        }
        sched_yield();
        if (now_ns() >= until)
            return false;
    }
}

/* Who offers the processor uses up its own time, and waits for its next turn when others come: it
 * is worth while only if waits are short, as the last ones were. */
static void learn_from(engine *e, int64_t waited_ns)
{
    int64_t patience = atomic_load_explicit(&e->patience_ns, memory_order_relaxed);
    patience = waited_ns <= PATIENCE_NS ? patience * 2 : patience / 2;
    if (patience > PATIENCE_NS)
        patience = PATIENCE_NS;
    if (patience < IMPATIENCE_NS)
        patience = IMPATIENCE_NS;
    atomic_store_explicit(&e->patience_ns, patience, memory_order_relaxed);
}

enum waited op_wait(op *o, double seconds)
{
    engine *e = o->group->engine;
    if (!is_here(o->group))
        group_fail(o->group, LEFT, o->group->rank, NULL);
    if (op_state(o) != UNDER_WAY)
        return IS_OVER;
    int64_t begun = now_ns(), until = begun + TICK_NS;
    if (seconds >= 0 && seconds < 0.1)
        until = begun + (int64_t)(seconds * 1e9);
    atomic_fetch_add_explicit(&e->drivers, 1, memory_order_relaxed);
    enum waited waited = NOT_YET;
    while (op_state(o) == UNDER_WAY) {
        int64_t now = now_ns();
        int64_t looks = now + atomic_load_explicit(&e->patience_ns, memory_order_relaxed);
        if (try_for_a_while(o, looks < until ? looks : until))
            break;
        now = now_ns();
        if (now >= until)
            break;
        if (sleep_on(o, until - now) == EINTR) {
            waited = INTERRUPTED;
            break;
        }
    }
    if (op_state(o) == UNDER_WAY) { /* after signals too: they may come more often than ticks */
        pthread_mutex_lock(&e->lock);
        look_after_all(e, true);
        pthread_mutex_unlock(&e->lock);
    }
    atomic_fetch_sub_explicit(&e->drivers, 1, memory_order_relaxed);
    learn_from(e, now_ns() - begun);
    return op_state(o) == UNDER_WAY ? waited : IS_OVER;
}

/* The helper: ops go on although nobody waits for them, for others may wait for those; and whoever
 * only asks now and then whether an op is over hears that a rank was lost. */
static void *help(void *of)
{
    engine *e = of;
    int idle = 0;
    for (;;) {
        struct timespec pause = {0, HELP_NS};
        nanosleep(&pause, NULL);
        pthread_mutex_lock(&e->lock);
        bool ends = e->ends;
        bool is_alone = atomic_load_explicit(&e->drivers, memory_order_relaxed) == 0;
        if (e->active > 0 && is_alone && !advance_all(e))
            look_after_all(e, true);
        idle = e->active > 0 ? 0 : idle + 1;
        if (idle >= IDLE_TURNS)
            atomic_store(&e->helper_word, 1);
        pthread_mutex_unlock(&e->lock);
        if (ends)
            return NULL;
        while (atomic_load(&e->helper_word)) {
            syscall(SYS_futex, &e->helper_word, FUTEX_WAIT_PRIVATE, 1, NULL, NULL, 0);
            idle = 0;
        }
    }
}
