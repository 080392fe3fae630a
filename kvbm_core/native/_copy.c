/* Copies of blocks that are scattered in memory; copy_blocks in kvbm_core/native/__init__.py says what they promise.
 *
 * Two ways, chosen by the CPU when the module is loaded. As a share of one memmove of everything, 8 layers, pages of
 * 8 KiB / 64 KiB that have no neighbours:
 *   memmove of each piece: Xeon with AVX-512 0.84 / 0.95, EPYC 0.58 to 0.66 / 0.84 to 1.02
 *   stores that bypass the caches: Xeon 0.74 / 0.87, EPYC 0.63 to 1.10 / 1.06 to 1.39; with the prefetches below the
 *   EPYC's worst, pages of 8 KiB out of memory without huge pages, goes from 0.63 to 0.79.
 * An ordinary store first reads the line that it overwrites, and a page of a cache is too short for the CPU's own
 * prefetching to get going.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define HAVE_X86 1
#endif

int kvbm_add_copies(PyObject *module);

typedef struct { char *dst; const char *src; } pair_t;

/* The pieces of all blocks, block by block. */
typedef struct {
    const pair_t *pairs;
    Py_ssize_t count, pieces, dst_stride, src_stride;
    size_t bytes;
} job_t;

typedef void (*copy_t)(const job_t *job);

static void copy_plainly(const job_t *job)
{
    for (Py_ssize_t n = 0; n < job->count; n++)
        for (Py_ssize_t piece = 0; piece < job->pieces; piece++)
            memmove(job->pairs[n].dst + piece * job->dst_stride, job->pairs[n].src + piece * job->src_stride,
                    job->bytes);
}

#ifdef HAVE_X86
#define LINE 64
#define STEP_BYTES 128       /* per turn of the loop */
#define AHEAD_BYTES 2048     /* how far before its use a line is asked for; 1024 to 6144 are alike */
#define PAGE_BYTES 4096      /* a line of each page of the piece after the next is asked for, to have the address */
#define WARMED_BYTES 16384   /* translated; of so many bytes */
#define WORTH_BYTES 1024     /* shorter pieces are left to memmove */

/* The source of the piece that comes `ahead` after `piece` of block n; the last one where there is none. */
static const char *later_source(const job_t *job, Py_ssize_t n, Py_ssize_t piece, Py_ssize_t ahead)
{
    n += (piece + ahead) / job->pieces;
    piece = n < job->count ? (piece + ahead) % job->pieces : job->pieces - 1;
    return job->pairs[n < job->count ? n : job->count - 1].src + piece * job->src_stride;
}

__attribute__((target("avx2"))) static void stream(char *dst, const char *src, size_t bytes, const char *next)
{
    size_t head = -(uintptr_t)dst & 31, at = head;
    memcpy(dst, src, head);
    for (; at + STEP_BYTES <= bytes; at += STEP_BYTES) {
        const char *soon = at + AHEAD_BYTES < bytes ? src + at + AHEAD_BYTES : next + (at + AHEAD_BYTES - bytes);
        _mm_prefetch(soon, _MM_HINT_T0);
        _mm_prefetch(soon + LINE, _MM_HINT_T0);
        __m256i lines[4];
        for (int i = 0; i < 4; i++)
            lines[i] = _mm256_loadu_si256((const __m256i *)(src + at + 32 * i));
        for (int i = 0; i < 4; i++)
            _mm256_stream_si256((__m256i *)(dst + at + 32 * i), lines[i]);
    }
    memcpy(dst + at, src + at, bytes - at);
}

static void copy_streaming(const job_t *job)
{
    for (Py_ssize_t n = 0; n < job->count; n++)
        for (Py_ssize_t piece = 0; piece < job->pieces; piece++) {
            char *dst = job->pairs[n].dst + piece * job->dst_stride;
            const char *src = job->pairs[n].src + piece * job->src_stride, *later = later_source(job, n, piece, 2);
            if (dst < src + job->bytes && src < dst + job->bytes) {
                memmove(dst, src, job->bytes);
                continue;
            }
            for (size_t at = 0; at < job->bytes && at < WARMED_BYTES; at += PAGE_BYTES)
                _mm_prefetch(later + at, _MM_HINT_T0);
            stream(dst, src, job->bytes, later_source(job, n, piece, 1));
        }
    _mm_sfence(); /* who is told of the copy's end sees its bytes */
}

static int is_amd(void)
{
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
}
#endif

static copy_t streaming_way(void)
{
#ifdef HAVE_X86
    if (__builtin_cpu_supports("avx2")) /* asks for the operating system's consent (XCR0) too */
        return copy_streaming;
#endif
    return copy_plainly;
}

static copy_t best_way(void)
{
#ifdef HAVE_X86
    if (is_amd())
        return streaming_way();
#endif
    return copy_plainly;
}

static copy_t best = copy_plainly;

/* ---------------------------------------------------------------- arguments */

static int is_int64(const Py_buffer *ids)
{
    return ids->ndim == 1 && ids->itemsize == 8 && ids->format != NULL
           && (strcmp(ids->format, "l") == 0 || strcmp(ids->format, "q") == 0);
}

/* Whether the two sides and the ids fit each other; sets an error if not. */
static int shapes_fit(const Py_buffer *dst, const Py_buffer *dst_ids, const Py_buffer *src, const Py_buffer *src_ids)
{
    const Py_buffer *sides[] = {dst, src}, *ids[] = {dst_ids, src_ids};
    for (int i = 0; i < 2; i++) {
        if (sides[i]->ndim != 3 || sides[i]->itemsize != 1 || (sides[i]->shape[2] > 1 && sides[i]->strides[2] != 1)) {
            PyErr_SetString(PyExc_ValueError, "blocks are [piece, block, byte] arrays of single, neighbouring bytes");
            return 0;
        }
        if (!is_int64(ids[i])) {
            PyErr_SetString(PyExc_ValueError, "ids are an array of int64");
            return 0;
        }
    }
    if (dst->shape[0] != src->shape[0] || dst->shape[2] != src->shape[2]) {
        PyErr_Format(PyExc_ValueError, "%zd pieces of %zd bytes cannot be copied to %zd pieces of %zd", src->shape[0],
                     src->shape[2], dst->shape[0], dst->shape[2]);
        return 0;
    }
    if (dst_ids->shape[0] != src_ids->shape[0]) {
        PyErr_Format(PyExc_ValueError, "%zd blocks cannot be copied to %zd", src_ids->shape[0], dst_ids->shape[0]);
        return 0;
    }
    return 1;
}

/* The address of block `ids[n]`; NULL with an error set if there is no such block. */
static char *block_at(const Py_buffer *side, const Py_buffer *ids, Py_ssize_t n)
{
    int64_t id = ((const int64_t *)ids->buf)[n];
    if (id < 0 || id >= side->shape[1]) {
        PyErr_Format(PyExc_IndexError, "block %lld is not in 0..%zd", (long long)id, side->shape[1] - 1);
        return NULL;
    }
    return (char *)side->buf + id * side->strides[1];
}

static PyObject *copy_all(copy_t way, const Py_buffer *dst, const Py_buffer *dst_ids, const Py_buffer *src,
                          const Py_buffer *src_ids)
{
    if (!shapes_fit(dst, dst_ids, src, src_ids))
        return NULL;
    Py_ssize_t count = dst_ids->shape[0];
    /* Addresses are taken before the GIL is given away: the ids may change under us, and must not be trusted twice. */
    pair_t *pairs = PyMem_New(pair_t, count);
    if (pairs == NULL)
        return PyErr_NoMemory();
    for (Py_ssize_t n = 0; n < count; n++) {
        pairs[n].dst = block_at(dst, dst_ids, n);
        pairs[n].src = pairs[n].dst == NULL ? NULL : block_at(src, src_ids, n);
        if (pairs[n].src == NULL) {
            PyMem_Free(pairs);
            return NULL;
        }
    }
    job_t job = {pairs, count, dst->shape[0], dst->strides[0], src->strides[0], (size_t)dst->shape[2]};
#ifdef HAVE_X86
    if (job.bytes < WORTH_BYTES)
        way = copy_plainly;
#endif
    Py_BEGIN_ALLOW_THREADS
    way(&job);
    Py_END_ALLOW_THREADS
    PyMem_Free(pairs);
    Py_RETURN_NONE;
}

static PyObject *copy_by(copy_t way, PyObject *args)
{
    static const int flags[] = {PyBUF_STRIDES | PyBUF_WRITABLE, PyBUF_ND | PyBUF_FORMAT, PyBUF_STRIDES,
                                PyBUF_ND | PyBUF_FORMAT};
    PyObject *objects[4], *result = NULL;
    Py_buffer views[4];
    int got = 0;
    if (!PyArg_ParseTuple(args, "OOOO:copy_blocks", &objects[0], &objects[1], &objects[2], &objects[3]))
        return NULL;
    while (got < 4 && PyObject_GetBuffer(objects[got], &views[got], flags[got]) == 0)
        got++;
    if (got == 4)
        result = copy_all(way, &views[0], &views[1], &views[2], &views[3]);
    while (got > 0)
        PyBuffer_Release(&views[--got]);
    return result;
}

/* ---------------------------------------------------------------- module */

static PyObject *copy_blocks(PyObject *module, PyObject *args)
{
    (void)module;
    return copy_by(best, args);
}

static PyObject *copy_blocks_plain(PyObject *module, PyObject *args)
{
    (void)module;
    return copy_by(copy_plainly, args);
}

static PyObject *copy_blocks_streaming(PyObject *module, PyObject *args)
{
    (void)module;
    return copy_by(streaming_way(), args);
}

static PyMethodDef METHODS[] = {
    {"copy_blocks", copy_blocks, METH_VARARGS, NULL},
    {"copy_blocks_plain", copy_blocks_plain, METH_VARARGS, NULL},
    {"copy_blocks_streaming", copy_blocks_streaming, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

int kvbm_add_copies(PyObject *module)
{
    best = best_way();
    return PyModule_AddFunctions(module, METHODS);
}
