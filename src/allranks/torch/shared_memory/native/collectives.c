/* Collectives as pieces that go through slots of the segment, and sums in place.
 *
 * Piece q of a group takes its turn in slot q % SLOTS: each rank ENTERS what it gives into its part
 * of the slot once all are FINAL in the turn before, and says ARRIVED; once all have arrived each
 * takes what it needs, or adds up its own chunk, says SUMMED, and once all have, takes the chunks of
 * the others; then it says FINAL. Stages only grow, so that a slow rank never takes one turn for
 * another.
 */
#include <stdio.h>
#include <string.h>

#include "copies.h"
#include "engine.h"
#include "sums.h"

#define SMALL_BYTES (32u << 10) /* up to here every rank adds up everything: one round, not two */
#define BLOCK_BYTES 4096 /* added up and copied on while it is in the first cache */

static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t pieces_of(uint64_t count, uint64_t per_piece)
{
    return count == 0 ? 1 : (count + per_piece - 1) / per_piece;
}

static op *post_pieces(op *o, uint64_t per_piece)
{
    o->per_piece = per_piece;
    o->pieces = pieces_of(o->count, per_piece);
    return op_post(o);
}

/* Whether no cache holds what all ranks touch, so that a target is in none when it is read. */
static bool outgrows_caches(const group *g, uint64_t bytes)
{
    return bytes * (uint64_t)g->size > g->engine->cache_bytes;
}

op *post_all_reduce(group *g, const void *source, void *target, uint64_t count, int type, int how)
{
    op *o = op_new(g, ALL_REDUCE);
    if (o == NULL)
        return NULL;
    o->source = source, o->target = target, o->count = count;
    o->type = type, o->how = how, o->item = item_bytes[type];
    o->in_two_rounds = count * o->item > 2 * SMALL_BYTES / (uint64_t)g->size;
    o->past_caches = source != target && outgrows_caches(g, 2 * count * o->item);
    return post_pieces(o, SLOT_BYTES / o->item);
}

op *post_reduce_scatter(group *g, const void *source, void *target, uint64_t count, int type,
                        int how)
{
    op *o = op_new(g, REDUCE_SCATTER);
    if (o == NULL)
        return NULL;
    o->source = source, o->target = target, o->count = count;
    o->type = type, o->how = how, o->item = item_bytes[type];
    return post_pieces(o, SLOT_BYTES / (uint64_t)g->size / LINE * LINE / o->item);
}

op *post_all_gather(group *g, const void *source, void *target, uint64_t bytes)
{
    op *o = op_new(g, ALL_GATHER);
    if (o == NULL)
        return NULL;
    o->source = source, o->target = target, o->count = bytes, o->item = 1;
    o->past_caches = outgrows_caches(g, bytes * (uint64_t)(g->size + 1));
    return post_pieces(o, SLOT_BYTES);
}

op *post_broadcast(group *g, void *memory, uint64_t bytes, int root)
{
    op *o = op_new(g, BROADCAST);
    if (o == NULL)
        return NULL;
    o->source = o->target = memory, o->count = bytes, o->item = 1, o->peer = root;
    return post_pieces(o, SLOT_BYTES);
}

op *post_barrier(group *g)
{
    op *o = op_new(g, BARRIER);
    if (o == NULL)
        return NULL;
    o->item = 1;
    return post_pieces(o, 1);
}

op *plan_start(plan *p)
{
    op *o = op_new(p->group, PLANNED);
    if (o == NULL)
        return NULL;
    atomic_fetch_add_explicit(&p->holders, 1, memory_order_relaxed);
    o->plan = p, o->count = p->count, o->type = p->type, o->item = item_bytes[p->type];
    return post_pieces(o, p->count ? p->count : 1);
}

static phase *line_of(const op *o, uint64_t piece, int rank)
{
    const group *g = o->group;
    uint64_t turn = o->first + piece;
    if (o->kind == PLANNED)
        return phase_of(g->plans, g->size, turn % PLANS, rank);
    return phase_of(g->slots, g->size, turn % SLOTS, rank);
}

static uint64_t stage_of(const op *o, uint64_t piece, int stage)
{
    uint64_t slots = o->kind == PLANNED ? PLANS : SLOTS;
    return 4 * ((o->first + piece) / slots) + (uint64_t)stage;
}

static bool is_at(const op *o, uint64_t piece, int rank, int stage)
{
    phase *line = line_of(o, piece, rank);
    return atomic_load_explicit(&line->stage, memory_order_acquire) >= stage_of(o, piece, stage);
}

static bool all_at(const op *o, uint64_t piece, int stage)
{
    for (int rank = 0; rank < o->group->size; rank++)
        if (!is_at(o, piece, rank, stage))
            return false;
    return true;
}

/* The last that comes rings for all: of two that come at once at least one sees the other. A root
 * rings at once: nobody else is waited for. */
static void publish(op *o, uint64_t piece, int stage)
{
    group *g = o->group;
    phase *line = line_of(o, piece, g->rank);
    if (o->past_caches)
        order_copies();
    atomic_store_explicit(&line->stage, stage_of(o, piece, stage), memory_order_release);
    atomic_thread_fence(memory_order_seq_cst);
    if ((o->kind == BROADCAST && g->rank == o->peer) || all_at(o, piece, stage))
        group_ring_all(g);
}

static char *data_of(const op *o, uint64_t piece, int rank)
{
    const group *g = o->group;
    uint64_t slot = (o->first + piece) % SLOTS;
    return g->data + (slot * (uint64_t)g->size + (uint64_t)rank) * SLOT_BYTES;
}

static uint64_t length_of(const op *o, uint64_t piece)
{
    uint64_t begun = piece * o->per_piece;
    return begun >= o->count ? 0 : smaller(o->per_piece, o->count - begun);
}

/* Where the chunk of a rank begins in a piece of so many elements; cut where lines are. */
static uint64_t chunk_begin(const op *o, uint64_t length, int rank)
{
    uint64_t line = LINE / o->item, size = (uint64_t)o->group->size;
    uint64_t each = ((length + size - 1) / size + line - 1) / line * line;
    return smaller(each * (uint64_t)rank, length);
}

static uint64_t what_of(const op *o)
{
    return (uint64_t)o->kind | (uint64_t)o->type << 8 | (uint64_t)o->how << 16 |
           (uint64_t)(uint32_t)o->peer << 24;
}

static void enter(op *o, uint64_t piece)
{
    group *g = o->group;
    uint64_t length = length_of(o, piece), item = o->item, begun = piece * o->per_piece * item;
    char *mine = o->kind == PLANNED ? NULL : data_of(o, piece, g->rank);
    switch (o->kind) {
    case ALL_REDUCE:
        if (o->in_two_rounds) { /* the own chunk is added up from where it is */
            uint64_t low = chunk_begin(o, length, g->rank) * item;
            uint64_t high = chunk_begin(o, length, g->rank + 1) * item;
            memcpy(mine, o->source + begun, low);
            memcpy(mine + high, o->source + begun + high, length * item - high);
            break;
        } /* fall through */
    case ALL_GATHER:
        memcpy(mine, o->source + begun, length * item);
        break;
    case REDUCE_SCATTER:
        for (int rank = 0; rank < g->size; rank++) {
            const char *from = o->source + (uint64_t)rank * o->count * item + begun;
            if (rank != g->rank)
                memcpy(mine + (uint64_t)rank * o->per_piece * item, from, length * item);
        }
        break;
    case BROADCAST:
        if (g->rank == o->peer)
            memcpy(mine, o->source + begun, length * item);
        break;
    default:
        break;
    }
    phase *line = line_of(o, piece, g->rank);
    line->what = what_of(o);
    line->count = o->count;
    publish(o, piece, ARRIVED);
}

static void add_planned(const op *o)
{
    const plan *p = o->plan;
    group *g = o->group;
    uint64_t low = chunk_begin(o, p->count, g->rank), high = chunk_begin(o, p->count, g->rank + 1);
    if (p->scatter)
        low = (uint64_t)g->rank * p->count, high = low + p->count;
    for (int i = 0; i < p->leaves; i++)
        p->shifted_leaf[i] = p->leaf[i] + low * o->item;
    for (int i = 0; i < g->size; i++)
        p->shifted_target[i] = p->target[i] + low * o->item;
    char *own = p->scatter ? p->target[g->rank] : p->shifted_target[g->rank];
    add_along_tree(own, p->shifted_leaf, p->leaves, p->merges, high - low, p->type, SUM,
                   p->shifted_target, p->scatter ? 0 : g->size);
}

/* Sums elements [low, high) of a piece, whose begin in the slot of each rank is at `shift`. */
static void add_slots(const op *o, uint64_t piece, char *target, uint64_t shift, uint64_t low,
                      uint64_t high, const char *own)
{
    group *g = o->group;
    char *leaf[MOST_RANKS];
    for (int rank = 0; rank < g->size; rank++)
        leaf[rank] = data_of(o, piece, rank) + (shift + low) * o->item;
    if (own != NULL)
        leaf[g->rank] = (char *)own;
    add_along_tree(target, leaf, g->size, g->merges, high - low, o->type, o->how, NULL, 0);
}

static void copy_out(const op *o, char *to, const char *from, uint64_t bytes)
{
    if (o->past_caches)
        copy_past_caches(to, from, bytes);
    else
        memcpy(to, from, bytes);
}

/* Into the slot, for the others, and on into the target. */
static void add_own_chunk(const op *o, uint64_t piece)
{
    uint64_t length = length_of(o, piece), item = o->item, begun = piece * o->per_piece * item;
    uint64_t low = chunk_begin(o, length, o->group->rank);
    uint64_t high = chunk_begin(o, length, o->group->rank + 1);
    const char *own = o->source + begun;
    char *mine = data_of(o, piece, o->group->rank), *target = o->target + begun;
    for (uint64_t end; low < high; low = end) {
        end = smaller(low + BLOCK_BYTES / item, high);
        add_slots(o, piece, mine + low * item, 0, low, end, own + low * item);
        copy_out(o, target + low * item, mine + low * item, (end - low) * item);
    }
}

/* All have arrived: take what is there, or add up the own chunk for all. */
static void take(op *o, uint64_t piece)
{
    group *g = o->group;
    uint64_t length = length_of(o, piece), item = o->item, begun = piece * o->per_piece * item;
    switch (o->kind) {
    case PLANNED:
        add_planned(o);
        break;
    case ALL_REDUCE:
        if (o->in_two_rounds)
            add_own_chunk(o, piece);
        else
            add_slots(o, piece, o->target + begun, 0, 0, length, NULL);
        break;
    case REDUCE_SCATTER:
        add_slots(o, piece, o->target + begun, (uint64_t)g->rank * o->per_piece, 0, length,
                  o->source + (uint64_t)g->rank * o->count * item + begun);
        break;
    case ALL_GATHER:
        for (int rank = 0; rank < g->size; rank++) {
            char *to = o->target + (uint64_t)rank * o->count + begun;
            const char *from = rank == g->rank ? o->source + begun : data_of(o, piece, rank);
            if (to != from)
                copy_out(o, to, from, length);
        }
        break;
    case BROADCAST:
        if (g->rank != o->peer)
            memcpy(o->target + begun, data_of(o, piece, o->peer), length);
        break;
    default:
        break;
    }
    publish(o, piece, o->in_two_rounds ? SUMMED : FINAL);
}

/* All chunks are added up: take those of the others. */
static void take_chunks(op *o, uint64_t piece)
{
    group *g = o->group;
    uint64_t length = length_of(o, piece), item = o->item, begun = piece * o->per_piece * item;
    for (int rank = 0; rank < g->size; rank++) {
        uint64_t low = chunk_begin(o, length, rank) * item;
        uint64_t high = chunk_begin(o, length, rank + 1) * item;
        if (rank != g->rank)
            copy_out(o, o->target + begun + low, data_of(o, piece, rank) + low, high - low);
    }
    publish(o, piece, FINAL);
}

/* ---- what each rank makes, so that two that differ hear of it ---- */

static void describe(char *to, size_t room, uint64_t what, uint64_t count)
{
    static const char *const kinds[] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                        "barrier", "all_reduce in place"};
    static const char *const types[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                        "uint8", "int16", "int32", "int64"};
    unsigned kind = what & 0xff, type = what >> 8 & 0xff;
    const char *unit = kind == ALL_GATHER || kind == BROADCAST || kind == BARRIER || type >= TYPES
                           ? "bytes" : types[type];
    snprintf(to, room, "%s of %llu %s", kind <= PLANNED ? kinds[kind] : "?",
             (unsigned long long)count, unit);
}

static void fail_contradicting(op *o, int rank, uint64_t what, uint64_t count)
{
    char its[64], own[64], text[192];
    describe(its, sizeof its, what, count);
    describe(own, sizeof own, what_of(o), o->count);
    snprintf(text, sizeof text, "makes another collective (%s) than rank %d (%s)", its,
             o->group->rank, own);
    group_fail(o->group, CONTRADICTION, rank, text);
}

static entry *entry_of(const group *g, uint64_t number, int rank)
{
    return g->journal + number % JOURNAL * (uint64_t)g->size + (uint64_t)rank;
}

void write_journal(op *o)
{
    entry *e = entry_of(o->group, o->number, o->group->rank);
    atomic_store_explicit(&e->number, 0, memory_order_relaxed);
    atomic_thread_fence(memory_order_release);
    atomic_store_explicit(&e->what, what_of(o), memory_order_relaxed);
    atomic_store_explicit(&e->count, o->count, memory_order_relaxed);
    atomic_store_explicit(&e->number, o->number, memory_order_release);
}

/* Whether a rank has posted something else in place of this op: then its group fails. What does not
 * meet in one slot is found here alone, by those who wait. */
bool contradicts(const op *o, int rank)
{
    entry *e = entry_of(o->group, o->number, rank);
    if (atomic_load_explicit(&e->number, memory_order_acquire) != o->number)
        return false;
    uint64_t what = atomic_load_explicit(&e->what, memory_order_relaxed);
    uint64_t count = atomic_load_explicit(&e->count, memory_order_relaxed);
    atomic_thread_fence(memory_order_acquire);
    if (atomic_load_explicit(&e->number, memory_order_relaxed) != o->number)
        return false;
    if (what == what_of(o) && count == o->count)
        return false;
    fail_contradicting((op *)o, rank, what, count);
    return true;
}

static bool is_agreed(const op *o, uint64_t piece)
{
    const group *g = o->group;
    const phase *own = line_of(o, piece, g->rank);
    for (int rank = 0; rank < g->size; rank++) {
        const phase *its = line_of(o, piece, rank);
        if (o->kind == BROADCAST && !is_at(o, piece, rank, ARRIVED))
            continue;
        if (its->what != own->what || its->count != own->count) {
            fail_contradicting((op *)o, rank, its->what, its->count);
            return false;
        }
    }
    return true;
}

static bool may_take(const op *o, uint64_t piece)
{
    if (o->kind == BROADCAST && o->group->rank != o->peer)
        return is_at(o, piece, o->peer, ARRIVED);
    return o->kind == BROADCAST || all_at(o, piece, ARRIVED);
}

/* In place, what this rank has written is read by the others, and the other way round: it is over
 * when all have ended. Of what goes through slots a rank needs nothing more. */
static bool may_end(const op *o, uint64_t piece)
{
    return o->kind != PLANNED || all_at(o, piece, FINAL);
}

/* Go on as far as the others allow; whether that was anything. */
bool advance_collective(op *o)
{
    bool moved = false;
    for (bool goes_on = true; goes_on;) {
        goes_on = false;
        if (o->over < o->summed &&
            (o->in_two_rounds ? all_at(o, o->over, SUMMED) : may_end(o, o->over))) {
            if (o->in_two_rounds)
                take_chunks(o, o->over);
            o->over++, goes_on = true;
        }
        if (o->summed < o->entered && may_take(o, o->summed)) {
            if (!is_agreed(o, o->summed))
                return true;
            take(o, o->summed);
            o->summed++, goes_on = true;
        }
        if (o->entered < o->pieces && all_at(o, o->entered, FREE)) {
            enter(o, o->entered);
            o->entered++, goes_on = true;
        }
        moved |= goes_on;
    }
    return moved;
}

/* Whether an op that does not go on is waiting for this rank. */
bool waits_for(const op *o, int rank)
{
    if (o->kind == SEND || o->kind == RECEIVE)
        return o->peer == rank || (o->peer == ANY_RANK && rank != o->group->rank);
    if (o->over < o->summed)
        return !is_at(o, o->over, rank, o->in_two_rounds ? SUMMED : FINAL);
    if (o->summed < o->entered)
        return !is_at(o, o->summed, rank, ARRIVED) && (o->kind != BROADCAST || rank == o->peer);
    return !is_at(o, o->entered, rank, FREE);
}
