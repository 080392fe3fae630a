/* The loops of kvbm that Python is too slow for; kvbm_core/native/__init__.py says what each function promises.
 *
 * SHA-256 is FIPS 180-4. What a CPU offers beyond the baseline is asked for when the module is loaded.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAVE_X86 1
#endif

#define DIGEST_BYTES 32
#define SHA_BLOCK_BYTES 64
/* Hashing fewer bytes than this (some tens of microseconds) is not worth giving the GIL away for: getting it
 * back can take longer. */
#define GIL_BYTES (64 << 10)

/* ---------------------------------------------------------------- SHA-256 */

typedef void (*compress_t)(uint32_t state[8], const uint8_t *data, size_t num_blocks);

static const uint32_t INITIAL[8] = {
    0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
};

static const uint32_t K[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static uint32_t load_be32(const uint8_t *at)
{
    return (uint32_t)at[0] << 24 | (uint32_t)at[1] << 16 | (uint32_t)at[2] << 8 | at[3];
}

static void store_be32(uint8_t *at, uint32_t value)
{
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (24 - 8 * i));
}

static uint32_t rotate(uint32_t value, int bits)
{
    return value >> bits | value << (32 - bits);
}

static void compress_portable(uint32_t state[8], const uint8_t *data, size_t num_blocks)
{
    for (; num_blocks; num_blocks--, data += SHA_BLOCK_BYTES) {
        uint32_t w[64], v[8];
        for (int i = 0; i < 16; i++)
            w[i] = load_be32(data + 4 * i);
        for (int i = 16; i < 64; i++) {
            uint32_t a = w[i - 15], b = w[i - 2];
            w[i] = w[i - 16] + w[i - 7] + (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3)
                   + (rotate(b, 17) ^ rotate(b, 19) ^ b >> 10);
        }
        memcpy(v, state, sizeof v);
        /* Instead of moving a to b, b to c and so on, the names move: unrolled, each is a register. */
#pragma GCC unroll 64
        for (int i = 0; i < 64; i++) {
            uint32_t a = v[-i & 7], b = v[(1 - i) & 7], c = v[(2 - i) & 7];
            uint32_t e = v[(4 - i) & 7], f = v[(5 - i) & 7], g = v[(6 - i) & 7];
            uint32_t t = v[(7 - i) & 7] + K[i] + w[i] + ((e & f) ^ (~e & g))
                         + (rotate(e, 6) ^ rotate(e, 11) ^ rotate(e, 25));
            v[(3 - i) & 7] += t;
            v[(7 - i) & 7] = t + (rotate(a, 2) ^ rotate(a, 13) ^ rotate(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        }
        for (int i = 0; i < 8; i++)
            state[i] += v[i];
    }
}

#ifdef HAVE_X86
/* Four rounds a turn; the instructions want the state as (a b e f) and (c d g h), highest word first. */
__attribute__((target("sha,sse4.1"))) static void
compress_sha_ni(uint32_t state[8], const uint8_t *data, size_t num_blocks)
{
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i abef = _mm_set_epi32((int)state[0], (int)state[1], (int)state[4], (int)state[5]);
    __m128i cdgh = _mm_set_epi32((int)state[2], (int)state[3], (int)state[6], (int)state[7]);
    for (; num_blocks; num_blocks--, data += SHA_BLOCK_BYTES) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int i = 0; i < 4; i++)
            w[i] = _mm_shuffle_epi8(_mm_loadu_si128((const __m128i *)(data + 16 * i)), swap);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m128i *now = &w[i & 3], next = w[(i + 1) & 3], last = w[(i + 3) & 3];
            __m128i sum = _mm_add_epi32(*now, _mm_loadu_si128((const __m128i *)(K + 4 * i)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (i < 12)
                *now = _mm_sha256msg2_epu32(
                    _mm_add_epi32(_mm_sha256msg1_epu32(*now, next), _mm_alignr_epi8(last, w[(i + 2) & 3], 4)), last);
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }
    uint32_t high[4], low[4];
    _mm_storeu_si128((__m128i *)high, abef);
    _mm_storeu_si128((__m128i *)low, cdgh);
    for (int i = 0; i < 2; i++) {
        state[i] = high[3 - i];
        state[4 + i] = high[1 - i];
        state[2 + i] = low[3 - i];
        state[6 + i] = low[1 - i];
    }
}
#endif

static compress_t best_compress(void)
{
#ifdef HAVE_X86
    unsigned a, b, c, d;
    int has_sse41 = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_SSE4_1) && (c & bit_SSSE3);
    if (has_sse41 && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & bit_SHA))
        return compress_sha_ni;
#endif
    return compress_portable;
}

static compress_t compress = compress_portable;

/* ---------------------------------------------------------------- chain */

/* A message is header, parent, block and padding; all have one length, so only parent and block are replaced. */
static void hash_chain(compress_t use, uint8_t *message, Py_ssize_t header_bytes, size_t message_blocks,
                       const uint8_t *tokens, Py_ssize_t step, Py_ssize_t num_blocks, uint8_t *digests)
{
    uint8_t *parent = message + header_bytes, *block = parent + DIGEST_BYTES;
    for (Py_ssize_t n = 0; n < num_blocks; n++) {
        uint32_t state[8];
        memcpy(state, INITIAL, sizeof state);
        memcpy(block, tokens + n * step, (size_t)step);
        use(state, message, message_blocks);
        for (int i = 0; i < 8; i++)
            store_be32(parent + 4 * i, state[i]);
        memcpy(digests + n * DIGEST_BYTES, parent, DIGEST_BYTES);
    }
}

static PyObject *list_of_digests(const uint8_t *digests, Py_ssize_t num_blocks)
{
    PyObject *list = PyList_New(num_blocks);
    for (Py_ssize_t n = 0; list != NULL && n < num_blocks; n++) {
        PyObject *digest = PyBytes_FromStringAndSize((const char *)digests + n * DIGEST_BYTES, DIGEST_BYTES);
        if (digest == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, n, digest);
    }
    return list;
}

static PyObject *chain_of(compress_t use, const Py_buffer *parent, const Py_buffer *header, const Py_buffer *tokens,
                          Py_ssize_t step)
{
    if (parent->len != DIGEST_BYTES)
        return PyErr_Format(PyExc_ValueError, "a parent has %d bytes, not %zd", DIGEST_BYTES, parent->len);
    if (step < 1 || tokens->len % step)
        return PyErr_Format(PyExc_ValueError, "%zd bytes are not whole blocks of %zd", tokens->len, step);
    Py_ssize_t num_blocks = tokens->len / step;
    if (num_blocks == 0)
        return PyList_New(0);
    size_t content = (size_t)header->len + DIGEST_BYTES + (size_t)step;
    size_t message_blocks = (content + 1 + 8 + SHA_BLOCK_BYTES - 1) / SHA_BLOCK_BYTES;
    uint8_t *message = PyMem_Calloc(message_blocks, SHA_BLOCK_BYTES);
    uint8_t *digests = PyMem_Malloc((size_t)num_blocks * DIGEST_BYTES);
    PyObject *list = NULL;
    if (message == NULL || digests == NULL) {
        PyErr_NoMemory();
    } else {
        memcpy(message, header->buf, (size_t)header->len);
        memcpy(message + header->len, parent->buf, DIGEST_BYTES);
        message[content] = 0x80;
        uint8_t *bits = message + message_blocks * SHA_BLOCK_BYTES - 8;
        store_be32(bits, (uint32_t)((uint64_t)content >> 29));
        store_be32(bits + 4, (uint32_t)((uint64_t)content << 3));
        PyThreadState *released = tokens->len >= GIL_BYTES ? PyEval_SaveThread() : NULL;
        hash_chain(use, message, header->len, message_blocks, tokens->buf, step, num_blocks, digests);
        if (released != NULL)
            PyEval_RestoreThread(released);
        list = list_of_digests(digests, num_blocks);
    }
    PyMem_Free(digests);
    PyMem_Free(message);
    return list;
}

static PyObject *chain_with(compress_t use, PyObject *args)
{
    Py_buffer parent, header, tokens;
    Py_ssize_t step;
    if (!PyArg_ParseTuple(args, "y*y*y*n:chain", &parent, &header, &tokens, &step))
        return NULL;
    PyObject *list = chain_of(use, &parent, &header, &tokens, step);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&header);
    PyBuffer_Release(&parent);
    return list;
}

static PyObject *chain(PyObject *module, PyObject *args)
{
    (void)module;
    return chain_with(compress, args);
}

static PyObject *chain_portable(PyObject *module, PyObject *args)
{
    (void)module;
    return chain_with(compress_portable, args);
}

/* ---------------------------------------------------------------- pack_u32 */

/* Token objects lie all over the heap: so many are asked for ahead of their turn. */
#define TOKENS_AHEAD 16

/* Returns 0, or -1 with an error set. Runs Python code where `item` has an __index__ of its own. */
static int store_token(uint8_t *at, PyObject *item)
{
    unsigned long value;
    if (PyLong_CheckExact(item)) {
        value = PyLong_AsUnsignedLong(item);
    } else {
        PyObject *index = PyNumber_Index(item);
        if (index == NULL)
            return -1;
        value = PyLong_AsUnsignedLong(index);
        Py_DECREF(index);
    }
    if (value == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    if (value > UINT32_MAX) {
        PyErr_SetString(PyExc_OverflowError, "unsigned int is greater than maximum");
        return -1;
    }
    for (int i = 0; i < 4; i++)
        at[i] = (uint8_t)(value >> (8 * i));
    return 0;
}

static PyObject *pack_u32(PyObject *module, PyObject *tokens)
{
    (void)module;
    PyObject *list = PySequence_Fast(tokens, "tokens are a sequence");
    if (list == NULL)
        return NULL;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(list);
    PyObject *packed = count > PY_SSIZE_T_MAX / 4 ? PyErr_NoMemory() : PyBytes_FromStringAndSize(NULL, 4 * count);
    for (Py_ssize_t n = 0; packed != NULL && n < count; n++) {
        int failed = 1;
        if (n < PySequence_Fast_GET_SIZE(list)) {
            PyObject *item = PySequence_Fast_GET_ITEM(list, n);
            if (n + TOKENS_AHEAD < count && n + TOKENS_AHEAD < PySequence_Fast_GET_SIZE(list))
                __builtin_prefetch(PySequence_Fast_GET_ITEM(list, n + TOKENS_AHEAD));
            Py_INCREF(item); /* its __index__ may change the list */
            failed = store_token((uint8_t *)PyBytes_AS_STRING(packed) + 4 * n, item);
            Py_DECREF(item);
        } else {
            PyErr_SetString(PyExc_ValueError, "tokens became fewer while they were read");
        }
        if (failed)
            Py_CLEAR(packed);
    }
    Py_DECREF(list);
    return packed;
}

/* ---------------------------------------------------------------- module */

static PyMethodDef METHODS[] = {
    {"chain", chain, METH_VARARGS, NULL},
    {"chain_portable", chain_portable, METH_VARARGS, NULL},
    {"pack_u32", pack_u32, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int kvbm_add_copies(PyObject *module); /* _copy.c */
int kvbm_add_index(PyObject *module); /* _index.c */
int kvbm_add_aio(PyObject *module); /* _aio.c */
int kvbm_add_names(PyObject *module); /* _names.c */

static int execute(PyObject *module)
{
    compress = best_compress();
    if (kvbm_add_copies(module) < 0 || kvbm_add_index(module) < 0 || kvbm_add_names(module) < 0)
        return -1;
    return kvbm_add_aio(module);
}

static PyModuleDef_Slot SLOTS[] = {{Py_mod_exec, (void *)execute}, {0, NULL}};

static PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT, .m_name = "_kvbm", .m_methods = METHODS, .m_slots = SLOTS,
};

PyMODINIT_FUNC PyInit__kvbm(void)
{
    return PyModuleDef_Init(&MODULE);
}
