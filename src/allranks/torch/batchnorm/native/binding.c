/* BatchNorm by shard as a Python module, on the stable ABI. Addresses are integers, 0 for none:
 * whoever calls has checked types and sizes (`in_c.py`), and keeps the memory alive. The
 * interpreter goes on meanwhile.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "norms.h"

typedef unsigned long long address;

static PyObject *normalise(PyObject *module, PyObject *given)
{
    address input, weight, bias, output, mean, var, inverse;
    long long pieces, rows, channels, values;
    int is_double;
    double eps;
    if (!PyArg_ParseTuple(given, "pK(LLLL)KKdKKKK", &is_double, &input, &pieces, &rows, &channels,
                          &values, &weight, &bias, &eps, &output, &mean, &var, &inverse))
        return NULL;
    struct shape shape = {pieces, rows, channels, values};
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        normalise_double((void *)input, shape, (void *)weight, (void *)bias, eps, (void *)output,
                         (void *)mean, (void *)var, (void *)inverse);
    else
        normalise_float((void *)input, shape, (void *)weight, (void *)bias, eps, (void *)output,
                        (void *)mean, (void *)var, (void *)inverse);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *derive(PyObject *module, PyObject *given)
{
    address gradient, input, weight, mean, inverse, found, of_weight, of_bias;
    long long pieces, rows, channels, values;
    int is_double;
    if (!PyArg_ParseTuple(given, "pKK(LLLL)KKKKKK", &is_double, &gradient, &input, &pieces, &rows,
                          &channels, &values, &weight, &mean, &inverse, &found, &of_weight,
                          &of_bias))
        return NULL;
    struct shape shape = {pieces, rows, channels, values};
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        derive_double((void *)gradient, (void *)input, shape, (void *)weight, (void *)mean,
                      (void *)inverse, (void *)found, (void *)of_weight, (void *)of_bias);
    else
        derive_float((void *)gradient, (void *)input, shape, (void *)weight, (void *)mean,
                     (void *)inverse, (void *)found, (void *)of_weight, (void *)of_bias);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"normalise", normalise, METH_VARARGS,
     "(is_double, input, shape, weight, bias, eps, output, mean, var, inverse)"},
    {"derive", derive, METH_VARARGS,
     "(is_double, gradient, input, shape, weight, mean, inverse, found, of_weight, of_bias)"},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_norms", "BatchNorm of shards that lie one behind the other.", 0,
    functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__norms(void) { return PyModuleDef_Init(&definition); }
