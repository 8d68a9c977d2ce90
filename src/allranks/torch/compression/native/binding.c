/* The codecs as a Python module, on the stable ABI. Addresses are integers: whoever calls has checked
 * types and sizes (`codecs.py`), and keeps the memory alive. The interpreter goes on meanwhile.
 */
#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "codecs.h"

typedef unsigned long long address;

static PyObject *encode_columns(PyObject *module, PyObject *given)
{
    address columns, messages;
    long long count, length;
    int is_double, bits;
    if (!PyArg_ParseTuple(given, "pKLLiK", &is_double, &columns, &count, &length, &bits, &messages))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        columns_encode_double((void *)columns, count, length, bits, (void *)messages);
    else
        columns_encode_float((void *)columns, count, length, bits, (void *)messages);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *decode_columns(PyObject *module, PyObject *given)
{
    address messages, into;
    long long count, length;
    int is_double, bits, adds;
    double alpha;
    if (!PyArg_ParseTuple(given, "pKLLiKdp", &is_double, &messages, &count, &length, &bits, &into,
                          &alpha, &adds))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        columns_decode_double((void *)messages, count, length, bits, (void *)into, alpha, adds);
    else
        columns_decode_float((void *)messages, count, length, bits, (void *)into, alpha, adds);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *top_k(PyObject *module, PyObject *given)
{
    address rows, indices;
    long long count, length, keep;
    int is_double;
    bool is_done;
    if (!PyArg_ParseTuple(given, "pKLLLK", &is_double, &rows, &count, &length, &keep, &indices))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    is_done = is_double ? top_k_double((void *)rows, count, length, keep, (void *)indices)
                        : top_k_float((void *)rows, count, length, keep, (void *)indices);
    Py_END_ALLOW_THREADS
    if (!is_done)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *encode_two_bits(PyObject *module, PyObject *given)
{
    address flat, message;
    long long count, bytes;
    int is_double;
    double threshold;
    if (!PyArg_ParseTuple(given, "pKLdKL", &is_double, &flat, &count, &threshold, &message, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        two_bit_encode_double((void *)flat, count, threshold, (void *)message, bytes);
    else
        two_bit_encode_float((void *)flat, count, threshold, (void *)message, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *add_two_bits(PyObject *module, PyObject *given)
{
    address message, into;
    long long count;
    int is_double;
    double threshold, alpha;
    if (!PyArg_ParseTuple(given, "pKLddK", &is_double, &message, &count, &threshold, &alpha, &into))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        two_bit_add_double((void *)message, count, threshold, alpha, (void *)into);
    else
        two_bit_add_float((void *)message, count, threshold, alpha, (void *)into);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *encode_four_bits(PyObject *module, PyObject *given)
{
    address flat, message;
    long long count, bytes;
    int is_double;
    if (!PyArg_ParseTuple(given, "pKLKL", &is_double, &flat, &count, &message, &bytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        four_bit_encode_double((void *)flat, count, (void *)message, bytes);
    else
        four_bit_encode_float((void *)flat, count, (void *)message, bytes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *add_four_bits(PyObject *module, PyObject *given)
{
    address message, into;
    long long count;
    int is_double;
    double alpha;
    if (!PyArg_ParseTuple(given, "pKLdK", &is_double, &message, &count, &alpha, &into))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    if (is_double)
        four_bit_add_double((void *)message, count, alpha, (void *)into);
    else
        four_bit_add_float((void *)message, count, alpha, (void *)into);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"encode_columns", encode_columns, METH_VARARGS,
     "(is_double, columns, count, length, bits, messages)"},
    {"decode_columns", decode_columns, METH_VARARGS,
     "(is_double, messages, count, length, bits, into, alpha, adds)"},
    {"top_k", top_k, METH_VARARGS, "(is_double, rows, count, length, keep, indices)"},
    {"encode_two_bits", encode_two_bits, METH_VARARGS,
     "(is_double, flat, count, threshold, message, bytes)"},
    {"add_two_bits", add_two_bits, METH_VARARGS,
     "(is_double, message, count, threshold, alpha, into)"},
    {"encode_four_bits", encode_four_bits, METH_VARARGS,
     "(is_double, flat, count, message, bytes)"},
    {"add_four_bits", add_four_bits, METH_VARARGS, "(is_double, message, count, alpha, into)"},
    {NULL, NULL, 0, NULL}};

static PyModuleDef_Slot slots[] = {{0, NULL}};
static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_codecs", "What codecs do with numbers one by one.", 0, functions, slots,
    NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__codecs(void) { return PyModuleDef_Init(&definition); }
