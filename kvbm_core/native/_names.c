/* What is made of the bytes of many keys; kvbm_core/native/__init__.py says what the functions promise. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define HASH_BYTES 32
#define FAN_DIGITS 3 /* kvbm_core/storage/names.py */
#define END_BYTES 24 /* "-255x4294967295" and more */
#define AHEAD 16 /* keys */

static const char DIGITS[] = "0123456789abcdef";

/* What all names have. `end` is that of `group`: most keys in a row are of one. */
struct parts {
    const char *folder;
    Py_ssize_t folder_bytes;
    unsigned int num_blocks;
    int group, end_bytes;
    char end[END_BYTES];
};

/* One name; NULL with an error set for what is no key. */
static PyObject *name_of(PyObject *key, struct parts *parts)
{
    if (!PyBytes_CheckExact(key)) {
        PyErr_SetString(PyExc_TypeError, "keys are bytes");
        return NULL;
    }
    Py_ssize_t key_bytes = PyBytes_GET_SIZE(key);
    if (key_bytes != HASH_BYTES && key_bytes != HASH_BYTES + 1) {
        PyErr_SetString(PyExc_ValueError, "a key has 32 or 33 bytes");
        return NULL;
    }
    const uint8_t *bytes = (const uint8_t *)PyBytes_AS_STRING(key);
    int group = key_bytes > HASH_BYTES ? bytes[HASH_BYTES] : 0;
    if (group != parts->group) {
        parts->group = group;
        parts->end_bytes = snprintf(parts->end, END_BYTES, "-%dx%u", group, parts->num_blocks);
    }
    Py_ssize_t folder_bytes = parts->folder_bytes;
    PyObject *name = PyUnicode_New(folder_bytes + FAN_DIGITS + 1 + 2 * HASH_BYTES + parts->end_bytes, 127);
    if (name == NULL)
        return NULL;
    char *fan = (char *)PyUnicode_1BYTE_DATA(name) + folder_bytes, *hex = fan + FAN_DIGITS + 1;
    memcpy(fan - folder_bytes, parts->folder, (size_t)folder_bytes);
    for (int i = 0; i < HASH_BYTES; i++) {
        hex[2 * i] = DIGITS[bytes[i] >> 4];
        hex[2 * i + 1] = DIGITS[bytes[i] & 15];
    }
    memcpy(fan, hex, FAN_DIGITS);
    fan[FAN_DIGITS] = '/';
    memcpy(hex + 2 * HASH_BYTES, parts->end, (size_t)parts->end_bytes);
    return name;
}

static PyObject *record_names(PyObject *module, PyObject *args)
{
    (void)module;
    PyObject *keys, *folder;
    struct parts parts = {.group = -1};
    if (!PyArg_ParseTuple(args, "OUI", &keys, &folder, &parts.num_blocks))
        return NULL;
    if (!PyUnicode_IS_ASCII(folder)) {
        PyErr_SetString(PyExc_ValueError, "a folder's name is ASCII");
        return NULL;
    }
    parts.folder = (const char *)PyUnicode_1BYTE_DATA(folder);
    parts.folder_bytes = PyUnicode_GET_LENGTH(folder);
    PyObject *own = PySequence_Tuple(keys); /* nobody else can change it */
    if (own == NULL)
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(own);
    PyObject *names = PyList_New(count);
    for (Py_ssize_t n = 0; names != NULL && n < count; n++) {
        PyObject *name = name_of(PyTuple_GET_ITEM(own, n), &parts);
        if (name == NULL)
            Py_CLEAR(names);
        else
            PyList_SET_ITEM(names, n, name);
    }
    Py_DECREF(own);
    return names;
}

/* One place of Departures. `name`: the last bytes of a key, but those that tell its place; there is `why`. */
struct departure {
    uint64_t name;
    float at_s, idle_s;
};

/* The last 8 bytes of a key, as a number; -1 with an error set for what is no key. */
static int end_of(PyObject *key, uint64_t *end)
{
    if (!PyBytes_CheckExact(key) || PyBytes_GET_SIZE(key) < (Py_ssize_t)sizeof(*end)) {
        PyErr_SetString(PyExc_TypeError, "keys are bytes, 8 at least");
        return -1;
    }
    memcpy(end, PyBytes_AS_STRING(key) + PyBytes_GET_SIZE(key) - sizeof(*end), sizeof(*end));
    return 0;
}

/* Keys that nobody has looked at for long, and their places, are in memory alone: many are waited for at once. */
static int note_all(PyObject **keys, Py_ssize_t count, struct departure *places, uint64_t last_place,
                    struct departure told, const float *idle_s)
{
    uint64_t ends[AHEAD];
    for (Py_ssize_t n = -2 * AHEAD; n < count; n++) {
        Py_ssize_t later = n + 2 * AHEAD, soon = n + AHEAD;
        uint64_t end = n < 0 ? 0 : ends[n % AHEAD];
        if (later < count) {
            __builtin_prefetch(keys[later]);
            __builtin_prefetch((const char *)keys[later] + offsetof(PyBytesObject, ob_sval) + HASH_BYTES - 1);
        }
        if (soon >= 0 && soon < count) {
            if (end_of(keys[soon], &ends[soon % AHEAD]) < 0)
                return -1;
            __builtin_prefetch(&places[ends[soon % AHEAD] & last_place], 1);
        }
        if (n >= 0) {
            struct departure *place = &places[end & last_place];
            *place = told;
            place->name |= end & ~last_place;
            place->idle_s = idle_s[n];
        }
    }
    return 0;
}

static PyObject *note_departures(PyObject *module, PyObject *args)
{
    (void)module;
    Py_buffer rows, idle;
    PyObject *sequence, *done = NULL;
    struct departure told = {0};
    unsigned int why;
    if (!PyArg_ParseTuple(args, "w*OIfy*:note_departures", &rows, &sequence, &why, &told.at_s, &idle))
        return NULL;
    told.name = why;
    Py_ssize_t num_places = rows.len / (Py_ssize_t)sizeof(told);
    PyObject *keys = PySequence_Fast(sequence, "keys are a sequence"); /* no other code runs meanwhile */
    if (keys == NULL)
        goto out;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    if (num_places < 1 || (num_places & (num_places - 1)) || rows.len % (Py_ssize_t)sizeof(told) || why >= num_places)
        PyErr_SetString(PyExc_ValueError, "places are a power of two, more than there are reasons");
    else if (idle.len != count * (Py_ssize_t)sizeof(float))
        PyErr_SetString(PyExc_ValueError, "idle seconds are a float32 for each key");
    else if (note_all(PySequence_Fast_ITEMS(keys), count, rows.buf, (uint64_t)num_places - 1, told, idle.buf) == 0)
        done = Py_NewRef(Py_None);
    Py_DECREF(keys);
out:
    PyBuffer_Release(&rows);
    PyBuffer_Release(&idle);
    return done;
}

static PyMethodDef METHODS[] = {
    {"record_names", record_names, METH_VARARGS, NULL},
    {"note_departures", note_departures, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int kvbm_add_names(PyObject *module) { return PyModule_AddFunctions(module, METHODS); }
