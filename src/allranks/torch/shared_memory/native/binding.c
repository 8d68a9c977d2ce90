/* The library as a Python module, on the stable ABI. Addresses are integers: whoever calls keeps the
 * memory alive, and as it is, until an op is over.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "collectives.h"
#include "sums.h"

static PyObject *peer_lost; /* PeerLost(message), with the attributes `rank` and `reason` */
static const char *const reasons[] = {"", "died", "stopped", "left", "contradiction"};

typedef struct {
    PyObject_HEAD engine *engine;
} PyEngine;

typedef struct {
    PyObject_HEAD group *group;
    PyObject *engine;
    int rank, size;
} PyGroup;

typedef struct {
    PyObject_HEAD op *op;
    PyObject *group;
} PyOp;

typedef struct {
    PyObject_HEAD plan *plan;
    PyObject *group;
} PyPlan;

static PyTypeObject *engine_type, *group_type, *op_type, *plan_type;

/* ---- arguments ---- */

static bool are(Py_ssize_t given, Py_ssize_t wanted)
{
    if (given == wanted)
        return true;
    PyErr_Format(PyExc_TypeError, "%zd arguments are wanted, %zd were given", wanted, given);
    return false;
}

static bool read_number(PyObject *from, uint64_t *to)
{
    *to = PyLong_AsUnsignedLongLong(from);
    return !PyErr_Occurred();
}

static bool read_numbers(PyObject *const *from, Py_ssize_t many, uint64_t *to)
{
    for (Py_ssize_t i = 0; i < many; i++)
        if (!read_number(from[i], &to[i]))
            return false;
    return true;
}

static bool is_below(uint64_t number, uint64_t limit, const char *what)
{
    if (number < limit)
        return true;
    PyErr_Format(PyExc_ValueError, "%s %llu is not below %llu", what, (unsigned long long)number,
                 (unsigned long long)limit);
    return false;
}

/* A tuple of addresses as an array that the caller frees. */
static char **read_addresses(PyObject *from, Py_ssize_t *many)
{
    if (!PyTuple_Check(from)) {
        PyErr_SetString(PyExc_TypeError, "a tuple of addresses is wanted");
        return NULL;
    }
    *many = PyTuple_Size(from);
    char **to = malloc(((size_t)*many + 1) * sizeof *to);
    if (to == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < *many; i++) {
        uint64_t address;
        if (!read_number(PyTuple_GetItem(from, i), &address)) {
            free(to);
            return NULL;
        }
        to[i] = (char *)(uintptr_t)address;
    }
    return to;
}

static void free_self(PyObject *self)
{
    PyTypeObject *type = Py_TYPE(self);
    freefunc free_it = (freefunc)PyType_GetSlot(type, Py_tp_free);
    free_it(self);
    Py_DECREF(type);
}

static PyObject *new_self(PyTypeObject *type)
{
    allocfunc allocate = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    return allocate(type, 0);
}

/* ---- ops ---- */

static PyObject *op_object(PyObject *group, op *o)
{
    if (o == NULL)
        return PyErr_NoMemory();
    PyOp *self = (PyOp *)new_self(op_type);
    if (self == NULL) {
        op_release(o);
        return NULL;
    }
    self->op = o;
    self->group = Py_NewRef(group);
    return (PyObject *)self;
}

static void op_dealloc(PyObject *self)
{
    PyOp *o = (PyOp *)self;
    if (o->op != NULL)
        op_release(o->op);
    Py_XDECREF(o->group);
    free_self(self);
}

static PyObject *raise_lost(PyGroup *group)
{
    enum lost why;
    int rank;
    const char *text = group_failure(group->group, &why, &rank);
    PyObject *error = PyObject_CallFunction(peer_lost, "s", text);
    if (error == NULL)
        return NULL;
    PyObject *number = PyLong_FromLong(rank), *reason = PyUnicode_FromString(reasons[why]);
    if (number != NULL && reason != NULL && PyObject_SetAttrString(error, "rank", number) == 0 &&
        PyObject_SetAttrString(error, "reason", reason) == 0)
        PyErr_SetObject(peer_lost, error);
    Py_XDECREF(number);
    Py_XDECREF(reason);
    Py_DECREF(error);
    return NULL;
}

static double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static PyObject *op_wait_for(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    PyOp *o = (PyOp *)self;
    double seconds = -1;
    if (given > 1 && !are(given, 1))
        return NULL;
    if (given == 1 && (seconds = PyFloat_AsDouble(args[0])) == -1 && PyErr_Occurred())
        return NULL;
    bool for_ever = seconds < 0;
    double until = for_ever ? 0 : clock_s() + seconds;
    while (op_state(o->op) == UNDER_WAY) {
        double left = for_ever ? -1 : until - clock_s();
        enum waited waited;
        Py_BEGIN_ALLOW_THREADS;
        waited = op_wait(o->op, for_ever || left > 0 ? left : 0);
        Py_END_ALLOW_THREADS;
        if (waited == IS_OVER)
            break;
        if (PyErr_CheckSignals() != 0)
            return NULL;
        if (!for_ever && clock_s() >= until)
            break;
    }
    if (op_state(o->op) == FAILED)
        return raise_lost((PyGroup *)o->group);
    return PyBool_FromLong(op_state(o->op) == DONE);
}

static PyObject *op_done(PyObject *self, void *unused)
{
    (void)unused;
    return PyBool_FromLong(op_state(((PyOp *)self)->op) != UNDER_WAY);
}

static PyObject *op_from(PyObject *self, void *unused)
{
    (void)unused;
    return PyLong_FromLong(op_source(((PyOp *)self)->op));
}

#define FAST(name, function, doc) {name, (PyCFunction)(void (*)(void))function, METH_FASTCALL, doc}

static PyMethodDef op_methods[] = {
    FAST("wait", op_wait_for,
         "wait(seconds=-1) -> whether it is complete; raises PeerLost, runs signal handlers"),
    {0}};
static PyGetSetDef op_getters[] = {
    {"done", op_done, NULL, "whether it is over, one way or the other", NULL},
    {"source", op_from, NULL, "of a receive that is over: the rank that sent", NULL},
    {0}};
static PyType_Slot op_slots[] = {{Py_tp_dealloc, op_dealloc},
                                 {Py_tp_methods, op_methods},
                                 {Py_tp_getset, op_getters},
                                 {Py_tp_doc, "A collective or a message under way."},
                                 {0}};
static PyType_Spec op_spec = {"allranks.torch.shared_memory._collectives.Op", sizeof(PyOp), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, op_slots};

/* ---- engines ---- */

static PyObject *engine_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    unsigned long long bell, cache_bytes = 0;
    double stopped_s;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Kd|K", &bell, &stopped_s, &cache_bytes))
        return NULL;
    PyEngine *self = (PyEngine *)new_self(type);
    if (self == NULL)
        return NULL;
    self->engine = engine_new((char *)(uintptr_t)bell, stopped_s, cache_bytes);
    if (self->engine == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void engine_dealloc(PyObject *self)
{
    PyEngine *e = (PyEngine *)self;
    if (e->engine != NULL) {
        Py_BEGIN_ALLOW_THREADS;
        engine_free(e->engine);
        Py_END_ALLOW_THREADS;
    }
    free_self(self);
}

static PyType_Slot engine_slots[] = {
    {Py_tp_new, engine_make},
    {Py_tp_dealloc, engine_dealloc},
    {Py_tp_doc, "Engine(bell, stopped, cache=0): drives all ops of this process, whose bell is at that "
                "address; a rank that is stopped for so many seconds is lost."},
    {0}};
static PyType_Spec engine_spec = {"allranks.torch.shared_memory._collectives.Engine",
                                  sizeof(PyEngine), 0, Py_TPFLAGS_DEFAULT, engine_slots};

/* ---- groups ---- */

/* Whether merges are those of a tree: none without two that are there, and one left in the end. */
static bool is_tree(const char *merges, Py_ssize_t leaves)
{
    int depth = 0;
    for (Py_ssize_t i = 0; i < leaves; i++) {
        if (++depth > DEEPEST || (unsigned char)merges[i] >= depth) {
            depth = 0;
            break;
        }
        depth -= (unsigned char)merges[i];
    }
    if (depth == 1)
        return true;
    PyErr_SetString(PyExc_ValueError, "merges are not those of a tree");
    return false;
}

static bool are_members(const membership *m, Py_ssize_t bells, Py_ssize_t pids, Py_ssize_t merges)
{
    if (m->size >= 1 && m->size <= MOST_RANKS && m->rank >= 0 && m->rank < m->size &&
        bells == m->size && pids == m->size && merges == m->size)
        return true;
    PyErr_SetString(PyExc_ValueError, "bells, processes and merges of every rank are wanted");
    return false;
}

static PyObject *group_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *engine, *bell_tuple, *pid_tuple;
    unsigned long long address;
    const char *merges;
    Py_ssize_t bell_count, pid_count, merge_count;
    int crowded;
    membership m = {0};
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!KiiOOy#p", engine_type, &engine, &address, &m.rank, &m.size,
                          &bell_tuple, &pid_tuple, &merges, &merge_count, &crowded))
        return NULL;
    PyGroup *self = NULL;
    char **bells = read_addresses(bell_tuple, &bell_count), **numbers = NULL;
    int pids[MOST_RANKS];
    if (bells == NULL || (numbers = read_addresses(pid_tuple, &pid_count)) == NULL ||
        !are_members(&m, bell_count, pid_count, merge_count) || !is_tree(merges, merge_count))
        goto end;
    for (int i = 0; i < m.size; i++)
        pids[i] = (int)(intptr_t)numbers[i];
    m.segment = (char *)(uintptr_t)address, m.bells = bells, m.pids = pids;
    m.merges = (const uint8_t *)merges, m.crowded = crowded != 0;
    self = (PyGroup *)new_self(type);
    if (self == NULL)
        goto end;
    self->rank = m.rank, self->size = m.size;
    self->engine = Py_NewRef(engine);
    self->group = group_new(((PyEngine *)engine)->engine, &m);
    if (self->group == NULL) {
        Py_DECREF(self);
        self = NULL;
        PyErr_NoMemory();
    }
end:
    free(bells);
    free(numbers);
    return (PyObject *)self;
}

static void group_dealloc(PyObject *self)
{
    PyGroup *g = (PyGroup *)self;
    if (g->group != NULL) {
        group_leave(g->group);
        group_free(g->group);
    }
    Py_XDECREF(g->engine);
    free_self(self);
}

static bool is_type(uint64_t type, uint64_t how)
{
    return is_below(type, TYPES, "type") && is_below(how, HOWS, "op");
}

#define POINTER(number) ((void *)(uintptr_t)(number))

static PyObject *reduction(op *(*post)(group *, const void *, void *, uint64_t, int, int),
                           PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    uint64_t a[5];
    group *g = ((PyGroup *)self)->group;
    if (!are(given, 5) || !read_numbers(args, 5, a) || !is_type(a[3], a[4]))
        return NULL;
    return op_object(self, post(g, POINTER(a[0]), POINTER(a[1]), a[2], (int)a[3], (int)a[4]));
}

static PyObject *all_reduce(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    return reduction(post_all_reduce, self, args, given);
}

static PyObject *reduce_scatter(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    return reduction(post_reduce_scatter, self, args, given);
}

static PyObject *all_gather(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    uint64_t a[3];
    PyGroup *g = (PyGroup *)self;
    if (!are(given, 3) || !read_numbers(args, 3, a))
        return NULL;
    return op_object(self, post_all_gather(g->group, POINTER(a[0]), POINTER(a[1]), a[2]));
}

static PyObject *broadcast(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    uint64_t a[3];
    PyGroup *g = (PyGroup *)self;
    if (!are(given, 3) || !read_numbers(args, 3, a) || !is_below(a[2], (uint64_t)g->size, "rank"))
        return NULL;
    return op_object(self, post_broadcast(g->group, POINTER(a[0]), a[1], (int)a[2]));
}

static PyObject *barrier(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)args;
    if (!are(given, 0))
        return NULL;
    return op_object(self, post_barrier(((PyGroup *)self)->group));
}

static PyObject *send(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    uint64_t a[4];
    PyGroup *g = (PyGroup *)self;
    if (!are(given, 4) || !read_numbers(args, 4, a) || !is_below(a[2], (uint64_t)g->size, "rank"))
        return NULL;
    return op_object(self, post_send(g->group, POINTER(a[0]), a[1], (int)a[2], a[3]));
}

static PyObject *receive(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    uint64_t a[2], tag;
    PyGroup *g = (PyGroup *)self;
    if (!are(given, 4) || !read_numbers(args, 2, a) || !read_number(args[3], &tag))
        return NULL;
    long from = PyLong_AsLong(args[2]);
    if (from == -1 && PyErr_Occurred())
        return NULL;
    if (from != ANY_RANK && !is_below((uint64_t)from, (uint64_t)g->size, "rank"))
        return NULL;
    return op_object(self, post_receive(g->group, POINTER(a[0]), a[1], (int)from, tag));
}

static PyObject *leave(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    (void)args;
    if (!are(given, 0))
        return NULL;
    group_leave(((PyGroup *)self)->group);
    Py_RETURN_NONE;
}

static PyObject *group_failed(PyObject *self, void *unused)
{
    enum lost why;
    int rank;
    (void)unused;
    return PyUnicode_FromString(group_failure(((PyGroup *)self)->group, &why, &rank));
}

static PyMethodDef group_methods[] = {
    FAST("all_reduce", all_reduce, "all_reduce(source, target, count, type, op) -> Op"),
    FAST("reduce_scatter", reduce_scatter,
         "reduce_scatter(source, target, count_per_rank, type, op) -> Op"),
    FAST("all_gather", all_gather, "all_gather(source, target, nbytes_per_rank) -> Op"),
    FAST("broadcast", broadcast, "broadcast(address, nbytes, root) -> Op"),
    FAST("barrier", barrier, "barrier() -> Op"),
    FAST("send", send, "send(address, nbytes, to, tag) -> Op"),
    FAST("receive", receive, "receive(address, nbytes, source, tag) -> Op; -1: of any rank"),
    FAST("leave", leave, "leave(): members that wait for this rank hear of it"),
    {0}};
static PyGetSetDef group_getters[] = {
    {"failed", group_failed, NULL, "what broke the group, or nothing", NULL}, {0}};
static PyType_Slot group_slots[] = {
    {Py_tp_new, group_make},
    {Py_tp_dealloc, group_dealloc},
    {Py_tp_methods, group_methods},
    {Py_tp_getset, group_getters},
    {Py_tp_doc, "Group(engine, address, rank, size, bells, pids, merges, crowded)"},
    {0}};
static PyType_Spec group_spec = {"allranks.torch.shared_memory._collectives.Group", sizeof(PyGroup),
                                 0, Py_TPFLAGS_DEFAULT, group_slots};

/* ---- plans ---- */

static PyObject *plan_make(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    PyObject *group, *leaf_tuple, *target_tuple;
    unsigned long long count;
    int kind, scatter;
    const char *merges;
    Py_ssize_t leaves, targets = 0, merge_count;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "O!OOKiy#p", group_type, &group, &leaf_tuple, &target_tuple, &count,
                          &kind, &merges, &merge_count, &scatter))
        return NULL;
    PyPlan *self = NULL;
    char **target = NULL, **leaf = read_addresses(leaf_tuple, &leaves);
    if (leaf == NULL || (target = read_addresses(target_tuple, &targets)) == NULL)
        goto end;
    if (leaves < 1 || merge_count != leaves || targets != ((PyGroup *)group)->size || kind < 0 ||
        kind >= TYPES) {
        PyErr_SetString(PyExc_ValueError, "merges of every leaf, and a target of every rank");
        goto end;
    }
    if (!is_tree(merges, merge_count))
        goto end;
    self = (PyPlan *)new_self(type);
    if (self == NULL)
        goto end;
    self->group = Py_NewRef(group);
    self->plan = plan_new(((PyGroup *)group)->group, (int)leaves, leaf, (const uint8_t *)merges,
                          target, count, kind, scatter != 0);
    if (self->plan == NULL) {
        Py_DECREF(self);
        self = NULL;
        PyErr_NoMemory();
    }
end:
    free(leaf);
    free(target);
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *self)
{
    PyPlan *p = (PyPlan *)self;
    if (p->plan != NULL)
        plan_free(p->plan);
    Py_XDECREF(p->group);
    free_self(self);
}

static PyObject *start(PyObject *self, PyObject *const *args, Py_ssize_t given)
{
    PyPlan *p = (PyPlan *)self;
    (void)args;
    if (!are(given, 0))
        return NULL;
    return op_object(p->group, plan_start(p->plan));
}

static PyMethodDef plan_methods[] = {FAST("start", start, "start() -> Op"), {0}};
static PyType_Slot plan_slots[] = {
    {Py_tp_new, plan_make},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_doc, "Plan(group, leaves, targets, count, type, merges, scatter): a sum in place"},
    {0}};
static PyType_Spec plan_spec = {"allranks.torch.shared_memory._collectives.Plan", sizeof(PyPlan), 0,
                                Py_TPFLAGS_DEFAULT, plan_slots};

/* ---- the module ---- */

static PyObject *segment_size(PyObject *self, PyObject *args)
{
    int size;
    (void)self;
    if (!PyArg_ParseTuple(args, "i", &size))
        return NULL;
    if (!is_below((uint64_t)size, MOST_RANKS + 1, "size"))
        return NULL;
    return PyLong_FromUnsignedLongLong(segment_bytes(size));
}

static PyMethodDef functions[] = {
    {"segment_bytes", segment_size, METH_VARARGS, "segment_bytes(size): of a group's segment"},
    {0}};

static PyObject *names(const char *const *of, int many)
{
    PyObject *table = PyDict_New();
    for (int i = 0; table != NULL && i < many; i++) {
        PyObject *number = PyLong_FromLong(i);
        if (number == NULL || PyDict_SetItemString(table, of[i], number) != 0)
            Py_CLEAR(table);
        Py_XDECREF(number);
    }
    return table;
}

static int add(PyObject *module, const char *name, PyObject *value)
{
    int failed = value == NULL ? -1 : PyModule_AddObjectRef(module, name, value);
    Py_XDECREF(value);
    return failed;
}

static PyTypeObject *add_type(PyObject *module, const char *name, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type == NULL || PyModule_AddObjectRef(module, name, type) != 0)
        return NULL;
    return (PyTypeObject *)type;
}

static int fill(PyObject *module)
{
    static const char *const types[] = {"float32", "float64", "float16", "bfloat16", "int8",
                                        "uint8",   "int16",   "int32",   "int64"};
    static const char *const hows[] = {"sum", "mean", "max", "min", "product"};
    peer_lost = PyErr_NewExceptionWithDoc(
        "allranks.torch.shared_memory._collectives.PeerLost",
        "Another rank will not come; `rank` says which, `reason` why.", PyExc_RuntimeError, NULL);
    if (peer_lost == NULL || PyModule_AddObjectRef(module, "PeerLost", peer_lost) != 0)
        return -1;
    engine_type = add_type(module, "Engine", &engine_spec);
    group_type = add_type(module, "Group", &group_spec);
    op_type = add_type(module, "Op", &op_spec);
    plan_type = add_type(module, "Plan", &plan_spec);
    if (!engine_type || !group_type || !op_type || !plan_type)
        return -1;
    if (add(module, "TYPES", names(types, TYPES)) || add(module, "OPS", names(hows, HOWS)))
        return -1;
    return PyModule_AddIntConstant(module, "BELL_BYTES", BELL_BYTES);
}

static PyModuleDef_Slot module_slots[] = {{Py_mod_exec, fill}, {0}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_collectives",
    "Collectives between processes of one host, through memory that they share.", 0, functions,
    module_slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__collectives(void) { return PyModuleDef_Init(&definition); }
