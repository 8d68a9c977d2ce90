/* Messages between two ranks: a ring of bytes for each ordered pair, in which each message follows a
 * head that says its tag and its size. Messages of one tag arrive in the order in which they were
 * posted; one whose tag nobody asks for yet is kept aside if something else is asked for.
 */
#include <stdlib.h>
#include <string.h>

#include "engine.h"

typedef struct {
    uint64_t tag, size;
} head;

#define ROUND 16
#define MASK (CHANNEL_BYTES - 1)

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t rounded(uint64_t bytes) { return (bytes + ROUND - 1) / ROUND * ROUND; }

op *post_send(group *g, const void *memory, uint64_t bytes, int to, uint64_t tag)
{
    op *o = op_new(g, SEND);
    if (o == NULL)
        return NULL;
    o->source = memory, o->count = bytes, o->peer = to, o->tag = tag;
    return op_post(o);
}

op *post_receive(group *g, void *memory, uint64_t bytes, int from, uint64_t tag)
{
    op *o = op_new(g, RECEIVE);
    if (o == NULL)
        return NULL;
    o->target = memory, o->count = bytes, o->peer = from, o->tag = tag;
    return op_post(o);
}

static void end(op *o) { atomic_store_explicit(&o->state, DONE, memory_order_release); }

/* Bytes go round the end of the ring in two parts. */
static void write_ring(char *ring, uint64_t at, const char *from, uint64_t bytes)
{
    uint64_t first = smaller(bytes, CHANNEL_BYTES - (at & MASK));
    memcpy(ring + (at & MASK), from, first);
    memcpy(ring, from + first, bytes - first);
}

static void read_ring(const char *ring, uint64_t at, char *to, uint64_t bytes)
{
    uint64_t first = smaller(bytes, CHANNEL_BYTES - (at & MASK));
    memcpy(to, ring + (at & MASK), first);
    memcpy(to + first, ring, bytes - first);
}

/* Write what fits of a message; whether that was anything. */
static bool advance_send(op *o)
{
    group *g = o->group;
    channel *c = channel_of(g, g->rank, o->peer);
    char *ring = channel_bytes(g, g->rank, o->peer);
    uint64_t written = atomic_load_explicit(&c->written, memory_order_relaxed);
    uint64_t read = atomic_load_explicit(&c->read, memory_order_acquire);
    uint64_t room = CHANNEL_BYTES - (written - read), before = written;
    if (!o->begun) {
        if (room < sizeof(head))
            return false;
        head h = {o->tag, o->count};
        write_ring(ring, written, (const char *)&h, sizeof h);
        written += sizeof h, room -= sizeof h, o->begun = true;
    }
    uint64_t left = rounded(o->count) - o->moved, now = smaller(smaller(left, PORTION), room / ROUND * ROUND);
    if (now > 0) {
        write_ring(ring, written, o->source + o->moved, smaller(now, o->count - o->moved));
        written += now, o->moved += now;
    }
    if (written == before && left > 0)
        return false;
    g->engine->parts++;
    atomic_store_explicit(&c->written, written, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    group_ring(g, o->peer);
    if (o->moved == rounded(o->count))
        end(o);
    return true;
}

static bool asks_for(const op *o, int from, uint64_t tag)
{
    return o->kind == RECEIVE && op_state(o) == UNDER_WAY && !o->begun && o->tag == tag &&
           (o->peer == from || o->peer == ANY_RANK);
}

static op *who_asks_for(group *g, int from, uint64_t tag)
{
    for (op *o = g->first; o != NULL; o = o->next)
        if (asks_for(o, from, tag))
            return o;
    return NULL;
}

static bool somebody_asks(group *g, int from)
{
    for (op *o = g->first; o != NULL; o = o->next)
        if (o->kind == RECEIVE && op_state(o) == UNDER_WAY && !o->begun &&
            (o->peer == from || o->peer == ANY_RANK))
            return true;
    return false;
}

/* An op takes up a message of this size, whose bytes are to come. */
static bool begin_receive(op *o, int from, uint64_t size)
{
    if (o->count != size) {
        group_fail(o->group, CONTRADICTION, from, "sends a message of another size than is asked for");
        return false;
    }
    o->begun = true, o->peer = from;
    return true;
}

static message *keep(group *g, int from, const head *h)
{
    message *m = calloc(1, sizeof *m);
    if (m == NULL)
        return NULL;
    m->bytes = malloc(h->size ? h->size : 1);
    if (m->bytes == NULL) {
        free(m);
        return NULL;
    }
    m->tag = h->tag, m->size = h->size, m->from = from;
    message **at = &g->kept;
    while (*at != NULL)
        at = &(*at)->next;
    return *at = m;
}

/* Read the head of the next message of a rank, if it is there and may be read. */
static bool open_message(group *g, int from, incoming *in, const head *h)
{
    op *o = who_asks_for(g, from, h->tag);
    message *kept = NULL;
    if (o == NULL) {
        if (!somebody_asks(g, from))
            return false; /* it waits where it is */
        kept = keep(g, from, h);
        if (kept == NULL) {
            group_fail(g, LEFT, g->rank, "has no memory for a message that came early");
            return false;
        }
    } else if (!begin_receive(o, from, h->size)) {
        return false;
    }
    *in = (incoming){h->tag, h->size, 0, o, kept, true};
    return true;
}

/* Messages that were kept go to those who ask for them by now. */
static bool hand_out(group *g)
{
    bool moved = false;
    for (message **at = &g->kept; *at != NULL;) {
        message *m = *at;
        op *o = m->is_whole ? who_asks_for(g, m->from, m->tag) : NULL;
        if (o == NULL || !begin_receive(o, m->from, m->size)) {
            at = &m->next;
            continue;
        }
        memcpy(o->target, m->bytes, m->size);
        end(o);
        *at = m->next;
        free(m->bytes);
        free(m);
        moved = true;
    }
    return moved;
}

/* Read what has come from a rank; whether that was anything. */
static bool advance_channel(group *g, int from)
{
    incoming *in = &g->incoming[from];
    channel *c = channel_of(g, from, g->rank);
    const char *ring = channel_bytes(g, from, g->rank);
    uint64_t read = atomic_load_explicit(&c->read, memory_order_relaxed), before = read;
    uint64_t written = atomic_load_explicit(&c->written, memory_order_acquire);
    while (written - read >= ROUND) {
        if (!in->is_open) {
            head h;
            read_ring(ring, read, (char *)&h, sizeof h);
            if (!open_message(g, from, in, &h))
                break;
            read += sizeof h;
        }
        uint64_t now = smaller(smaller(written - read, PORTION), rounded(in->size) - in->came);
        char *to = in->to != NULL ? in->to->target : in->kept->bytes;
        if (now > 0)
            read_ring(ring, read, to + in->came, smaller(now, in->size - in->came));
        read += now, in->came += now;
        if (in->came < rounded(in->size))
            break;
        if (in->to != NULL)
            end(in->to);
        in->is_open = false;
        if (in->to == NULL) { /* before a later one of its tag */
            in->kept->is_whole = true;
            hand_out(g);
        }
    }
    if (read == before)
        return false;
    atomic_store_explicit(&c->read, read, memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    group_ring(g, from);
    return true;
}

bool advance_messages(group *g)
{
    bool moved = g->kept != NULL && hand_out(g);
    for (op *o = g->first; o != NULL; o = o->next) {
        if (o->kind == SEND && op_state(o) == UNDER_WAY) {
            bool is_first = true; /* of those to that rank: they go one behind another */
            for (op *p = g->first; p != o && is_first; p = p->next)
                is_first = !(p->kind == SEND && p->peer == o->peer && op_state(p) == UNDER_WAY);
            if (is_first)
                moved |= advance_send(o);
        }
    }
    for (int from = 0; from < g->size; from++)
        if (g->incoming[from].is_open || somebody_asks(g, from))
            moved |= advance_channel(g, from);
    return moved;
}

void forget_messages(group *g)
{
    while (g->kept != NULL) {
        message *next = g->kept->next;
        free(g->kept->bytes);
        free(g->kept);
        g->kept = next;
    }
}
