/* How a process waits: it drives all ops, sleeps until others have gone on, and looks after them.
 *
 * Before a thread sleeps it says so on its bell, and drives once more; whoever publishes something
 * does so first, and looks then whether somebody sleeps: of the two at least one sees the other. A
 * helper thread, one for the process, drives what nobody waits for, now and then, and hears at once
 * when the process of another rank ends; while messages are to leave, it goes on with those as they
 * are read, and hears of an end within 5 ms.
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
#include <string.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define TICK_NS 100000000  /* how long a sleep lasts before the others are looked at */
#define SPINS 256          /* looks at once, before the processor is offered to others */
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

/* Without a handle (an old kernel, a sandbox, no descriptor left, or one that the program has closed)
 * the process id has to do. */
static bool has_died(peer *p, char letter)
{
    if (p->handle >= 0) {
        struct pollfd ended = {p->handle, POLLIN, 0};
        poll(&ended, 1, 0);
        if (!(ended.revents & POLLNVAL))
            return (ended.revents & POLLIN) != 0;
        p->handle = -1;
    }
    return letter == 'Z' || letter == 'X' || (kill(p->pid, 0) != 0 && errno == ESRCH);
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
    peer *p = g->peers[rank];
    if ((closely || p->has_ended) && is_waited_for(g, rank, false))
        lost = p->has_ended ? DIED : look_at(p, g->engine);
    uint32_t word = atomic_load_explicit(group_left_word(g, rank), memory_order_acquire);
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
                group_collect(g);
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
    bool moved = false;
    while (group_advance(g)) /* of a message, a part at a time */
        moved = true;
    static const enum lost order[] = {DIED, STOPPED, CONTRADICTION, LEFT}; /* causes first */
    for (int k = 0; k < 4; k++)
        for (int rank = 0; rank < g->size; rank++) {
            bool by_name = order[k] == LEFT && left < g->size - 1;
            if (lost[rank] == order[k] && is_waited_for(g, rank, by_name)) {
                if (order[k] == CONTRADICTION && look_for_contradictions(g))
                    return true; /* in words of its own */
                group_fail(g, order[k], whom[rank], NULL);
                group_collect(g);
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
    bool moved = engine_advance(e) || look_after_all(e, false);
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
        bool moved = engine_advance(e);
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
    if (!group_is_here(o->group))
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
    if (atomic_load_explicit(&e->sending, memory_order_relaxed) > 0)
        engine_push_soon(e);
    learn_from(e, now_ns() - begun);
    return op_state(o) == UNDER_WAY ? waited : IS_OVER;
}

/* A descriptor that the program has closed may stand for something else, which is no timer. */
static void set_timer(engine *e, long ns)
{
    struct itimerspec at = {.it_value = {0, ns}};
    int timer = atomic_load_explicit(&e->timer, memory_order_relaxed);
    if (timer >= 0 && timerfd_settime(timer, 0, &at, NULL) != 0)
        atomic_store_explicit(&e->timer, -1, memory_order_relaxed);
}

void engine_push_soon(engine *e)
{
    int64_t soon = atomic_load_explicit(&e->soon_ns, memory_order_relaxed);
    if (soon < HELP_NS) /* else it looks by then anyway */
        set_timer(e, soon);
}

/* Messages for which there was no room, and nobody waits: somebody has to go on with them. Where that
 * was of no use for a while, nobody reads them, and to look now and then is enough. */
static bool has_to_push(engine *e)
{
    return atomic_load_explicit(&e->sending, memory_order_relaxed) > 0 &&
           atomic_load_explicit(&e->drivers, memory_order_relaxed) == 0 &&
           atomic_load_explicit(&e->soon_ns, memory_order_relaxed) < HELP_NS;
}

/* Drive, with the lock held, and learn whether that was of use to messages; whether to anything. */
static bool advance_and_learn(engine *e)
{
    uint64_t before = e->parts;
    bool moved = engine_advance(e);
    int64_t soon = atomic_load_explicit(&e->soon_ns, memory_order_relaxed);
    soon = e->parts != before ? SOON_NS : soon < HELP_NS ? soon * 2 : soon;
    atomic_store_explicit(&e->soon_ns, soon, memory_order_relaxed);
    return moved;
}

/* They leave while this process computes, as the others read: sleep as whoever waits does. */
static void push(engine *e, int64_t ns)
{
    bell *b = e->bell;
    for (int64_t now = now_ns(), until = now + ns; now < until && has_to_push(e); now = now_ns()) {
        uint32_t rung = atomic_load_explicit(&b->rung, memory_order_acquire);
        atomic_fetch_add_explicit(&b->asleep, 1, memory_order_seq_cst);
        atomic_thread_fence(memory_order_seq_cst);
        pthread_mutex_lock(&e->lock);
        bool moved = advance_and_learn(e);
        pthread_mutex_unlock(&e->lock);
        if (!moved && has_to_push(e))
            futex_wait(&b->rung, rung, until - now, true);
        atomic_fetch_sub_explicit(&b->asleep, 1, memory_order_seq_cst);
    }
}

/* Sleep for so long, or until the timer, or until the process of another rank ends; whether one has,
 * not heard before. A handle that is closed meanwhile may stand for something else: it wakes for
 * nothing, once. */
static bool hear_of_ends(engine *e, int64_t ns)
{
    int timer = atomic_load_explicit(&e->timer, memory_order_relaxed);
    struct pollfd heard[MOST_RANKS + 1] = {{timer, POLLIN, 0}};
    struct timespec pause = {0, ns};
    nfds_t n = 1;
    pthread_mutex_lock(&e->lock);
    for (peer *p = e->peers; p != NULL && n <= MOST_RANKS; p = p->next)
        if (p->handle >= 0 && !p->has_ended)
            heard[n++] = (struct pollfd){p->handle, POLLIN, 0};
    pthread_mutex_unlock(&e->lock);
    int ready = ppoll(heard, n, &pause, NULL);
    if (ready <= 0)
        return false;
    if (heard[0].revents != 0)
        set_timer(e, 0); /* heard */
    if (heard[0].revents != 0 && ready == 1)
        return false;
    bool any = false;
    pthread_mutex_lock(&e->lock);
    for (peer *p = e->peers; p != NULL; p = p->next)
        if (p->handle >= 0 && !p->has_ended && has_died(p, 0))
            any = p->has_ended = true;
    pthread_mutex_unlock(&e->lock);
    return any;
}

/* The helper: ops go on although nobody waits for them, for others may wait for those; and whoever
 * only asks now and then whether an op is over hears that a rank was lost. */
void *engine_help(void *of)
{
    engine *e = of;
    int idle = 0;
    for (;;) {
        push(e, HELP_NS);
        bool any_ended = hear_of_ends(e, has_to_push(e) ? 0 : HELP_NS);
        pthread_mutex_lock(&e->lock);
        bool ends = e->ends;
        bool is_alone = atomic_load_explicit(&e->drivers, memory_order_relaxed) == 0;
        if (any_ended)
            look_after_all(e, false);
        else if (e->active > 0 && is_alone && !advance_and_learn(e))
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
