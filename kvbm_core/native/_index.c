/* The index of one tier's blocks, by key and by slot; class Index in kvbm_core/native/_kvbm.pyi says what the
 * methods promise.
 *
 * The GIL is held throughout, and nothing here runs Python code while records are being changed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_table.h"

int kvbm_add_index(PyObject *module);

/* ---------------------------------------------------------------- arguments */

/* A view of int32 numbers; -1 with an error set if `object` is something else. */
static int get_slots(PyObject *object, Py_buffer *slots, int writable, Py_ssize_t at_least)
{
    if (PyObject_GetBuffer(object, slots, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) < 0)
        return -1;
    if (slots->ndim == 1 && strcmp(slots->format, "i") == 0 && slots->shape[0] >= at_least)
        return 0;
    PyBuffer_Release(slots);
    PyErr_Format(PyExc_ValueError, "slots are an array of at least %zd int32", at_least);
    return -1;
}

/* Two arguments: keys, as list or tuple (a new reference), and an array of slots. */
static PyObject *get_keys_and_slots(PyObject *args, Py_buffer *slots, int writable)
{
    PyObject *sequence, *array;
    if (!PyArg_ParseTuple(args, "OO", &sequence, &array))
        return NULL;
    PyObject *keys = PySequence_Fast(sequence, "keys are a sequence");
    if (keys != NULL && get_slots(array, slots, writable, writable ? PySequence_Fast_GET_SIZE(keys) : 0) < 0)
        Py_CLEAR(keys);
    return keys;
}

/* ---------------------------------------------------------------- finding */

/* Slots of the keys that are in `state`, to `slots`: of all such, or up to the first that is not. -1 for an error. */
static Py_ssize_t locate(const index_t *self, PyObject *keys, uint8_t state, int stop, int32_t *slots)
{
    Py_ssize_t num_keys = PySequence_Fast_GET_SIZE(keys), found = 0;
    PyObject *const *objects = PySequence_Fast_ITEMS(keys);
    for (Py_ssize_t start = 0; start < num_keys; start += AT_ONCE) {
        lookup_t lookups[AT_ONCE];
        Py_ssize_t count = Py_MIN(AT_ONCE, num_keys - start);
        if (read_keys(self, objects + start, count, lookups) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            const record_t *record = record_of(self, &lookups[i]);
            if (record != NULL && record->state == state)
                slots[found++] = (int32_t)(record - self->records);
            else if (stop)
                return found;
        }
    }
    return found;
}

static PyObject *locate_resident(PyObject *object, PyObject *args, int stop)
{
    Py_buffer slots;
    PyObject *keys = get_keys_and_slots(args, &slots, 1);
    if (keys == NULL)
        return NULL;
    Py_ssize_t found = locate((const index_t *)object, keys, RESIDENT, stop, slots.buf);
    PyBuffer_Release(&slots);
    Py_DECREF(keys);
    return found < 0 ? NULL : PyLong_FromSsize_t(found);
}

static PyObject *find(PyObject *object, PyObject *args)
{
    return locate_resident(object, args, 1);
}

static PyObject *slots_of(PyObject *object, PyObject *args)
{
    return locate_resident(object, args, 0);
}

static int is_in_state(PyObject *object, PyObject *key, uint8_t state)
{
    const index_t *self = (const index_t *)object;
    lookup_t lookup;
    if (read_key(self, key, &lookup) < 0)
        return -1;
    const record_t *record = record_of(self, &lookup);
    return record != NULL && record->state == state;
}

static int contains(PyObject *object, PyObject *key)
{
    return is_in_state(object, key, RESIDENT);
}

static PyObject *is_pending(PyObject *object, PyObject *key)
{
    int answer = is_in_state(object, key, PENDING);
    return answer < 0 ? NULL : PyBool_FromLong(answer);
}

/* The numbers in `keys` of those that are not registered, each once, to `chosen`; `seen` is a table of such numbers
 * plus one, all 0, with `seen_mask` + 1 places. Their count, or -1. */
static Py_ssize_t choose_new(const index_t *self, PyObject *keys, uint32_t *seen, size_t seen_mask, uint32_t *chosen)
{
    Py_ssize_t num_keys = PySequence_Fast_GET_SIZE(keys), num_chosen = 0;
    PyObject *const *objects = PySequence_Fast_ITEMS(keys);
    for (Py_ssize_t start = 0; start < num_keys; start += AT_ONCE) {
        lookup_t lookups[AT_ONCE];
        Py_ssize_t count = Py_MIN(AT_ONCE, num_keys - start);
        if (read_keys(self, objects + start, count, lookups) < 0)
            return -1;
        for (Py_ssize_t i = 0; i < count; i++) {
            if (record_of(self, &lookups[i]) != NULL)
                continue;
            size_t at = lookups[i].hash & seen_mask;
            while (seen[at] != 0 && !same_key(objects[seen[at] - 1], objects[start + i]))
                at = (at + 1) & seen_mask;
            if (seen[at] == 0) {
                seen[at] = (uint32_t)(start + i) + 1;
                chosen[num_chosen++] = (uint32_t)(start + i);
            }
        }
    }
    return num_chosen;
}

static PyObject *new_of(PyObject *object, PyObject *sequence)
{
    PyObject *keys = PySequence_Tuple(sequence), *result = NULL; /* no list: making the result may run a finalizer */
    if (keys == NULL)
        return NULL;
    size_t num_keys = (size_t)PySequence_Fast_GET_SIZE(keys), places = 2;
    while (places < 2 * num_keys)
        places *= 2;
    uint32_t *seen = num_keys > MAX_SLOTS ? NULL : PyMem_Calloc(places + num_keys, sizeof *seen);
    uint32_t *chosen = seen == NULL ? NULL : seen + places;
    Py_ssize_t count = -1;
    if (seen == NULL)
        PyErr_NoMemory();
    else
        count = choose_new((const index_t *)object, keys, seen, places - 1, chosen);
    if (count >= 0)
        result = PyTuple_New(count);
    for (Py_ssize_t i = 0; result != NULL && i < count; i++)
        PyTuple_SET_ITEM(result, i, Py_NewRef(PyTuple_GET_ITEM(keys, chosen[i])));
    PyMem_Free(seen);
    Py_DECREF(keys);
    return result;
}

/* ---------------------------------------------------------------- changing */

static PyObject *grow(PyObject *object, PyObject *argument)
{
    index_t *self = (index_t *)object;
    long capacity_slots = PyLong_AsLong(argument);
    if (capacity_slots == -1 && PyErr_Occurred())
        return NULL;
    if (capacity_slots > MAX_SLOTS)
        return PyErr_Format(PyExc_ValueError, "%ld slots are more than %d", capacity_slots, MAX_SLOTS);
    int bits = self->bits;
    while (capacity_slots > (long)room_of(bits))
        bits++;
    if (bits > self->bits && make_room(self, bits) < 0)
        return NULL;
    if (capacity_slots > self->capacity_slots)
        self->capacity_slots = (int32_t)capacity_slots;
    Py_RETURN_NONE;
}

/* Registers one key; -1 with an error set and nothing changed. */
static int put(index_t *self, const lookup_t *key, int32_t slot)
{
    size_t at = probe(self, key);
    if (self->table[at].place != 0) {
        PyErr_SetString(PyExc_ValueError, "reserve: a key is registered already, or given twice");
        return -1;
    }
    if (slot < 0 || slot >= self->capacity_slots || self->records[slot].state != FREE) {
        PyErr_Format(PyExc_ValueError, "reserve: slot %d is taken, given twice or not there", (int)slot);
        return -1;
    }
    record_t *record = &self->records[slot];
    memcpy(record->digest, key->digest, DIGEST_BYTES);
    record->group = key->group;
    record->state = PENDING;
    self->table[at] = (entry_t){key->hash, (uint32_t)slot + 1};
    return 0;
}

static PyObject *reserve(PyObject *object, PyObject *args)
{
    index_t *self = (index_t *)object;
    Py_buffer slots;
    PyObject *keys = get_keys_and_slots(args, &slots, 0);
    if (keys == NULL)
        return NULL;
    Py_ssize_t num_keys = PySequence_Fast_GET_SIZE(keys), done = 0;
    const int32_t *numbers = slots.buf;
    int failed = slots.shape[0] != num_keys;
    if (failed)
        PyErr_Format(PyExc_ValueError, "reserve: %zd keys do not go with %zd slots", num_keys, slots.shape[0]);
    while (!failed && done < num_keys) {
        lookup_t lookups[AT_ONCE];
        Py_ssize_t start = done, count = Py_MIN(AT_ONCE, num_keys - start);
        failed = read_keys(self, PySequence_Fast_ITEMS(keys) + start, count, lookups) < 0;
        while (!failed && done < start + count) {
            failed = put(self, &lookups[done - start], numbers[done]) < 0;
            done += !failed;
        }
    }
    if (!failed)
        self->pending += done;
    while (failed && done > 0)
        take_out(self, numbers[--done]);
    PyBuffer_Release(&slots);
    Py_DECREF(keys);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Moves the blocks in `slots` from one state to another; -1 and nothing moved if one of them was not in the first. */
static int move(index_t *self, const int32_t *slots, Py_ssize_t count, uint8_t from, uint8_t to)
{
    for (Py_ssize_t n = 0; n < count; n++) {
        if (slots[n] < 0 || slots[n] >= self->capacity_slots || self->records[slots[n]].state != from) {
            while (n > 0)
                self->records[slots[--n]].state = from;
            return -1;
        }
        self->records[slots[n]].state = to;
    }
    return 0;
}

/* The pending keys become resident or, with LEAVING, are taken out. */
static PyObject *end_pending(PyObject *object, PyObject *args, uint8_t to)
{
    index_t *self = (index_t *)object;
    Py_buffer slots;
    PyObject *keys = get_keys_and_slots(args, &slots, 1);
    if (keys == NULL)
        return NULL;
    Py_ssize_t num_keys = PySequence_Fast_GET_SIZE(keys);
    Py_ssize_t found = locate(self, keys, PENDING, 1, slots.buf);
    int failed = found < num_keys || move(self, slots.buf, num_keys, PENDING, to) < 0;
    if (!failed) {
        self->pending -= num_keys;
        self->resident += to == RESIDENT ? num_keys : 0;
    } else if (found >= 0) {
        PyErr_SetString(PyExc_KeyError, "a key is not on its way, or given twice");
    }
    if (!failed && to == LEAVING)
        take_out_all(self, slots.buf, num_keys);
    PyBuffer_Release(&slots);
    Py_DECREF(keys);
    return failed ? NULL : Py_NewRef(Py_None);
}

static PyObject *commit(PyObject *object, PyObject *args)
{
    return end_pending(object, args, RESIDENT);
}

static PyObject *cancel(PyObject *object, PyObject *args)
{
    return end_pending(object, args, LEAVING);
}

/* The key objects of `count` slots, to `list`; None for a slot without a resident block. -1 for an error. */
static int list_keys(const index_t *self, const int32_t *slots, Py_ssize_t count, PyObject *list)
{
    for (Py_ssize_t n = 0; n < count; n++) {
        if (slots[n] < 0 || slots[n] >= self->capacity_slots) {
            PyErr_Format(PyExc_IndexError, "slot %d is not there", (int)slots[n]);
            return -1;
        }
        const record_t *record = &self->records[slots[n]];
        PyObject *key = record->state == RESIDENT ? key_object(record) : Py_NewRef(Py_None);
        if (key == NULL)
            return -1;
        PyList_SET_ITEM(list, n, key);
    }
    return 0;
}

static PyObject *keys_in(PyObject *object, PyObject *array)
{
    Py_buffer slots;
    if (get_slots(array, &slots, 0, 0) < 0)
        return NULL;
    PyObject *list = PyList_New(slots.shape[0]);
    if (list != NULL && list_keys((const index_t *)object, slots.buf, slots.shape[0], list) < 0)
        Py_CLEAR(list);
    PyBuffer_Release(&slots);
    return list;
}

static PyObject *drop(PyObject *object, PyObject *array)
{
    index_t *self = (index_t *)object;
    PyObject *list = keys_in(object, array);
    Py_buffer slots;
    if (list == NULL || get_slots(array, &slots, 0, 0) < 0) {
        Py_XDECREF(list);
        return NULL;
    }
    if (move(self, slots.buf, slots.shape[0], RESIDENT, LEAVING) < 0) {
        PyErr_SetString(PyExc_KeyError, "a slot holds no resident block, or is given twice");
        Py_CLEAR(list);
    } else {
        take_out_all(self, slots.buf, slots.shape[0]);
        self->resident -= slots.shape[0];
    }
    PyBuffer_Release(&slots);
    return list;
}

/* ---------------------------------------------------------------- the whole */

static Py_ssize_t resident_blocks(PyObject *object)
{
    return ((const index_t *)object)->resident;
}

static PyObject *pending_blocks(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    return PyLong_FromSsize_t(((const index_t *)object)->pending);
}

static PyObject *check(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    const char *fault = fault_of((const index_t *)object);
    return fault == NULL ? Py_NewRef(Py_None) : PyUnicode_FromString(fault);
}

static PyObject *new_index(PyTypeObject *type, PyObject *args, PyObject *names)
{
    unsigned long long seed;
    (void)names;
    if (!PyArg_ParseTuple(args, "K:Index", &seed))
        return NULL;
    index_t *self = (index_t *)type->tp_alloc(type, 0); /* all zero */
    if (self != NULL) {
        self->multiplier = seed | 1;
        if (make_room(self, MIN_BITS) < 0)
            Py_CLEAR(self);
    }
    return (PyObject *)self;
}

static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    PyMem_RawFree(((index_t *)object)->records);
    PyMem_RawFree(((index_t *)object)->table);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"grow", grow, METH_O, NULL},
    {"new_of", new_of, METH_O, NULL},
    {"reserve", reserve, METH_VARARGS, NULL},
    {"commit", commit, METH_VARARGS, NULL},
    {"cancel", cancel, METH_VARARGS, NULL},
    {"drop", drop, METH_O, NULL},
    {"find", find, METH_VARARGS, NULL},
    {"slots_of", slots_of, METH_VARARGS, NULL},
    {"keys_in", keys_in, METH_O, NULL},
    {"is_pending", is_pending, METH_O, NULL},
    {"pending_blocks", pending_blocks, METH_NOARGS, NULL},
    {"check", check, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, (void *)new_index}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, METHODS},
    {Py_sq_contains, (void *)contains}, {Py_sq_length, (void *)resident_blocks}, {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "kvbm_core.native._kvbm.Index", .basicsize = sizeof(index_t), .flags = Py_TPFLAGS_DEFAULT, .slots = SLOTS,
};

int kvbm_add_index(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&SPEC);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Index", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}
