/* Where the blocks of one tier are: the data under _index.c.
 *
 * A record for each slot, and a hash table of slots with open addressing: linear probing, and entries moved back
 * when one is taken out. It has room for a block in every slot with LOAD_TENTHS of it in use, so only `grow` ever
 * hashes anew. The GIL is held throughout, and nothing here runs Python code while records are being changed.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* As SEQUENCE_HASH_BYTES in kvbm_core/types.py, where a key is described. */
#define DIGEST_BYTES 32
#define LOAD_TENTHS 7
#define MIN_BITS 4
#define MAX_SLOTS (1 << 30)
/* Keys that are looked up together: their cache misses overlap. */
#define AT_ONCE 32

enum { FREE, PENDING, RESIDENT, LEAVING };

typedef struct { uint8_t digest[DIGEST_BYTES], group, state; } record_t;
typedef struct { uint32_t hash, place; } entry_t; /* place: slot + 1, or 0 in an empty entry */
typedef struct { const uint8_t *digest; uint32_t hash; uint8_t group; } lookup_t;

typedef struct {
    PyObject_HEAD
    record_t *records;
    entry_t *table;
    int bits;
    int32_t capacity_slots;
    Py_ssize_t resident, pending;
    uint64_t multiplier;
} index_t;

/* ---------------------------------------------------------------- keys and the table */

static size_t mask_of(const index_t *self)
{
    return ((size_t)1 << self->bits) - 1;
}

static size_t home_of(const index_t *self, uint32_t hash)
{
    return hash >> (32 - self->bits);
}

/* Whoever chooses prompts chooses digests; not knowing the multiplier, he cannot choose their places in the table. */
static uint32_t hash_of(const index_t *self, const uint8_t *digest, uint8_t group)
{
    uint64_t word;
    memcpy(&word, digest, sizeof word);
    return (uint32_t)(((word + group) * self->multiplier) >> 32);
}

static lookup_t lookup_of_slot(const index_t *self, int32_t slot)
{
    const record_t *record = &self->records[slot];
    return (lookup_t){record->digest, hash_of(self, record->digest, record->group), record->group};
}

static int read_key(const index_t *self, PyObject *object, lookup_t *key)
{
    if (!PyBytes_Check(object)) {
        PyErr_Format(PyExc_TypeError, "a block key is bytes, not %s", Py_TYPE(object)->tp_name);
        return -1;
    }
    Py_ssize_t nbytes = PyBytes_GET_SIZE(object);
    key->digest = (const uint8_t *)PyBytes_AS_STRING(object);
    key->group = nbytes == DIGEST_BYTES + 1 ? key->digest[DIGEST_BYTES] : 0;
    if (nbytes != DIGEST_BYTES && key->group == 0) {
        PyErr_Format(PyExc_ValueError, "a block key of %zd bytes, or one that names group 0", nbytes);
        return -1;
    }
    key->hash = hash_of(self, key->digest, key->group);
    return 0;
}

static PyObject *key_object(const record_t *record)
{
    return PyBytes_FromStringAndSize((const char *)record->digest, DIGEST_BYTES + (record->group != 0));
}

static int same_key(PyObject *one, PyObject *other)
{
    return PyBytes_GET_SIZE(one) == PyBytes_GET_SIZE(other)
           && memcmp(PyBytes_AS_STRING(one), PyBytes_AS_STRING(other), (size_t)PyBytes_GET_SIZE(one)) == 0;
}

/* Reads `count` <= AT_ONCE keys and asks for the memory that looking them up will touch. */
static int read_keys(const index_t *self, PyObject *const *objects, Py_ssize_t count, lookup_t *keys)
{
    for (Py_ssize_t i = 0; i < count; i++) {
        __builtin_prefetch(objects[i]);
        __builtin_prefetch((const char *)objects[i] + offsetof(PyBytesObject, ob_sval) + DIGEST_BYTES);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (read_key(self, objects[i], &keys[i]) < 0)
            return -1;
        __builtin_prefetch(&self->table[home_of(self, keys[i].hash)]);
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        entry_t entry = self->table[home_of(self, keys[i].hash)];
        if (entry.place != 0 && entry.hash == keys[i].hash) {
            __builtin_prefetch(&self->records[entry.place - 1]);
            __builtin_prefetch(&self->records[entry.place - 1].state);
        }
    }
    return 0;
}

/* Where the key's entry is, or the empty one at which the search for it ends. */
static size_t probe(const index_t *self, const lookup_t *key)
{
    size_t at = home_of(self, key->hash);
    for (;; at = (at + 1) & mask_of(self)) {
        entry_t entry = self->table[at];
        if (entry.place == 0)
            return at;
        const record_t *record = &self->records[entry.place - 1];
        if (entry.hash == key->hash && record->group == key->group
            && memcmp(record->digest, key->digest, DIGEST_BYTES) == 0)
            return at;
    }
}

/* The record of a registered key, NULL for another. */
static record_t *record_of(const index_t *self, const lookup_t *key)
{
    uint32_t place = self->table[probe(self, key)].place;
    return place == 0 ? NULL : &self->records[place - 1];
}

/* Takes the block in `slot` out of the table, and frees the slot. Counts are the caller's. */
static void take_out(index_t *self, int32_t slot)
{
    lookup_t key = lookup_of_slot(self, slot);
    size_t mask = mask_of(self), hole = probe(self, &key);
    for (size_t at = (hole + 1) & mask; self->table[at].place != 0; at = (at + 1) & mask) {
        size_t home = home_of(self, self->table[at].hash);
        if (((at - home) & mask) >= ((at - hole) & mask)) { /* it may stand in the hole, not being before its home */
            self->table[hole] = self->table[at];
            hole = at;
        }
    }
    self->table[hole] = (entry_t){0, 0};
    self->records[slot].state = FREE;
}

static void take_out_all(index_t *self, const int32_t *slots, Py_ssize_t count)
{
    for (Py_ssize_t start = 0; start < count; start += AT_ONCE) {
        Py_ssize_t end = Py_MIN(start + AT_ONCE, count);
        for (Py_ssize_t n = start; n < end; n++)
            __builtin_prefetch(&self->table[home_of(self, lookup_of_slot(self, slots[n]).hash)], 1);
        for (Py_ssize_t n = start; n < end; n++)
            take_out(self, slots[n]);
    }
}

static size_t room_of(int bits)
{
    return ((size_t)LOAD_TENTHS << bits) / 10;
}

/* A table of 2 ** `bits` places, and records for as many slots as it has room for; -1 with everything as it was. */
static int make_room(index_t *self, int bits)
{
    entry_t *table = PyMem_RawCalloc((size_t)1 << bits, sizeof *table), *old = self->table;
    record_t *records = PyMem_RawCalloc(room_of(bits), sizeof *records); /* memory is taken when it is first written */
    if (table == NULL || records == NULL) {
        PyMem_RawFree(table);
        PyMem_RawFree(records);
        PyErr_NoMemory();
        return -1;
    }
    size_t old_entries = old == NULL ? 0 : mask_of(self) + 1;
    if (self->capacity_slots > 0)
        memcpy(records, self->records, (size_t)self->capacity_slots * sizeof *records);
    PyMem_RawFree(self->records);
    self->records = records;
    self->table = table;
    self->bits = bits;
    for (size_t i = 0; i < old_entries; i++) {
        size_t at = home_of(self, old[i].hash);
        if (old[i].place == 0)
            continue;
        while (table[at].place != 0)
            at = (at + 1) & mask_of(self);
        table[at] = old[i];
    }
    PyMem_RawFree(old);
    return 0;
}

/* What is wrong, NULL if nothing is. */
static const char *fault_of(const index_t *self)
{
    Py_ssize_t resident = 0, pending = 0, entries = 0;
    for (size_t at = 0; at <= mask_of(self); at++)
        entries += self->table[at].place != 0;
    for (int32_t slot = 0; slot < self->capacity_slots; slot++) {
        uint8_t state = self->records[slot].state;
        if (state == FREE)
            continue;
        lookup_t key = lookup_of_slot(self, slot);
        entry_t entry = self->table[probe(self, &key)];
        if (entry.place != (uint32_t)slot + 1 || entry.hash != key.hash)
            return "slot and key do not point to each other";
        resident += state == RESIDENT;
        pending += state == PENDING;
    }
    if (resident != self->resident || pending != self->pending || entries != resident + pending)
        return "blocks are counted wrong";
    return NULL;
}
