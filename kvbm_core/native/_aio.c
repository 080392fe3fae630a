/* Reads and writes of one file by Linux AIO; class Aio in kvbm_core/native/_kvbm.pyi says what the methods promise.
 *
 * A request waits here, is the kernel's once it is started, and lies here again when it has ended, until it is
 * collected. What the kernel does not give back is never freed, nor is its context destroyed: io_destroy would wait
 * for it. The GIL is given away for system calls only, and nothing moves from place to place without it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

int kvbm_add_aio(PyObject *module);

#ifdef __has_include
#if __has_include(<linux/aio_abi.h>) && defined(__LP64__) /* io_getevents takes another timespec elsewhere */
#define HAVE_AIO 1
#endif
#endif

#ifdef HAVE_AIO
#include <errno.h>
#include <linux/aio_abi.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* The pause before another try where the kernel had no room for a request and has none of ours that could end. */
#define RETRY_S 0.001

typedef struct request {
    struct iocb iocb;
    struct request *next;
    int64_t tag, result;
    struct iovec pieces[];
} request_t;

typedef struct { request_t *first, *last; } queue_t;

typedef struct {
    PyObject_HEAD
    aio_context_t context; /* 0: closed */
    struct iocb **batch;   /* room for `depth` of each */
    struct io_event *events;
    queue_t waiting, ended;
    Py_ssize_t in_flight, started, num_ended;
    int depth, fd, is_closing, is_busy;
} aio_t;

/* ---------------------------------------------------------------- requests */

static void push(queue_t *queue, request_t *request)
{
    request->next = NULL;
    *(queue->first == NULL ? &queue->first : &queue->last->next) = request;
    queue->last = request;
}

static request_t *pop(queue_t *queue)
{
    request_t *first = queue->first;
    queue->first = first->next;
    return first;
}

static void free_all(queue_t *queue)
{
    while (queue->first != NULL)
        PyMem_RawFree(pop(queue));
}

static void end(aio_t *self, request_t *request, int64_t result)
{
    request->result = result;
    push(&self->ended, request);
    self->num_ended++;
}

static void forget_ended(aio_t *self)
{
    free_all(&self->ended);
    self->in_flight -= self->num_ended;
    self->num_ended = 0;
}

/* ---------------------------------------------------------------- the kernel */

/* Gives the kernel as many of those that wait as it may have. One that it refuses has ended; io_submit stops there,
 * and those after it go with the next call. */
static void start(aio_t *self)
{
    while (self->waiting.first != NULL && self->started < self->depth) {
        long count = 0, got;
        int error;
        for (request_t *at = self->waiting.first; at != NULL && self->started + count < self->depth; at = at->next)
            self->batch[count++] = &at->iocb;
        Py_BEGIN_ALLOW_THREADS
        got = syscall(SYS_io_submit, self->context, count, self->batch);
        error = errno;
        Py_END_ALLOW_THREADS
        if (got < 0 && error != EAGAIN && error != EINTR)
            end(self, pop(&self->waiting), -error);
        else if (got <= 0)
            return;
        for (; got > 0; got--, self->started++)
            (void)pop(&self->waiting);
    }
}

/* Takes back what ends within `left_s`; returns how many, or -errno. */
static long reap(aio_t *self, double left_s)
{
    int is_idle = self->started == 0, error;
    long got;
    left_s = left_s < 0 ? 0 : is_idle ? Py_MIN(left_s, RETRY_S) : left_s;
    struct timespec left = {(time_t)left_s, (long)((left_s - (double)(time_t)left_s) * 1e9)};
    Py_BEGIN_ALLOW_THREADS
    if (is_idle)
        got = nanosleep(&left, NULL);
    else
        got = syscall(SYS_io_getevents, self->context, 1L, (long)self->depth, self->events, &left);
    error = errno;
    Py_END_ALLOW_THREADS
    for (long n = 0; n < got; n++)
        end(self, (request_t *)(uintptr_t)self->events[n].data, self->events[n].res);
    self->started -= Py_MAX(got, 0);
    return got < 0 ? -error : got;
}

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Waits until something has ended, nothing is in flight or it is time; -1 with an error set, and nothing is lost. */
static int wait_until(aio_t *self, double deadline_s)
{
    while (self->in_flight > 0) {
        start(self);
        double left_s = self->num_ended > 0 ? 0 : deadline_s - now_s();
        long got = reap(self, left_s);
        if (got > 0)
            start(self);
        if (got == -EINTR && PyErr_CheckSignals() < 0)
            return -1;
        if (self->num_ended > 0 || (left_s <= 0 && (got >= 0 || got == -EINTR)))
            return 0;
        if (got < 0 && got != -EINTR) {
            errno = (int)-got;
            PyErr_SetFromErrno(PyExc_OSError);
            return -1;
        }
    }
    return 0;
}

static void destroy(aio_t *self)
{
    Py_BEGIN_ALLOW_THREADS
    syscall(SYS_io_destroy, self->context); /* some milliseconds */
    Py_END_ALLOW_THREADS
    self->context = 0;
}

/* ---------------------------------------------------------------- arguments */

/* Another thread may come while the GIL is away, and a signal's handler or a finalizer at other times. */
static int enter(aio_t *self)
{
    if (self->is_busy) {
        PyErr_SetString(PyExc_RuntimeError, "another call of this Aio is under way");
        return -1;
    }
    self->is_busy = 1;
    return 0;
}

static int enter_until(aio_t *self, PyObject *timeout_s, double *deadline_s)
{
    double timeout = PyFloat_AsDouble(timeout_s);
    if (timeout == -1 && PyErr_Occurred())
        return -1;
    *deadline_s = now_s() + (timeout > 0 ? Py_MIN(timeout, 1e9) : 0);
    return enter(self);
}

/* A view of numbers of one of the `formats`; -1 with an error set if `object` is something else. */
static int get_numbers(PyObject *object, Py_buffer *view, const char *formats)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) < 0)
        return -1;
    if (view->format != NULL && strlen(view->format) == 1 && strchr(formats, view->format[0]) != NULL)
        return 0;
    PyBuffer_Release(view);
    PyErr_Format(PyExc_ValueError, "an array of '%c' is wanted", formats[0]);
    return -1;
}

enum { TAGS, OFFSETS, COUNTS, PIECES, NUM_VIEWS };

static request_t *make_request(const aio_t *self, int is_write, int64_t tag, int64_t offset, const uint64_t *pieces,
                               size_t count)
{
    request_t *request = PyMem_RawMalloc(sizeof *request + count * sizeof request->pieces[0]);
    if (request == NULL)
        return NULL;
    memset(&request->iocb, 0, sizeof request->iocb);
    request->tag = tag;
    request->iocb.aio_data = (uintptr_t)request;
    request->iocb.aio_lio_opcode = is_write ? IOCB_CMD_PWRITEV : IOCB_CMD_PREADV;
    request->iocb.aio_fildes = (uint32_t)self->fd;
    request->iocb.aio_buf = (uintptr_t)request->pieces;
    request->iocb.aio_nbytes = count;
    request->iocb.aio_offset = offset;
    for (size_t n = 0; n < count; n++)
        request->pieces[n] = (struct iovec){(void *)(uintptr_t)pieces[2 * n], (size_t)pieces[2 * n + 1]};
    return request;
}

/* The requests that the arrays describe, to `made`; returns how many, or -1 with an error set. */
static Py_ssize_t make_requests(const aio_t *self, int is_write, const Py_buffer views[NUM_VIEWS], queue_t *made)
{
    Py_ssize_t num_requests = views[TAGS].len / 8, done = 0;
    size_t left = (size_t)views[PIECES].len / 16;
    const uint64_t *pieces = views[PIECES].buf;
    int fits = views[OFFSETS].len / 8 == num_requests && views[COUNTS].len / 4 == num_requests;
    while (fits && done < num_requests) {
        size_t count = (size_t)((const int32_t *)views[COUNTS].buf)[done]; /* a negative one is more than are left */
        if (count > left)
            break;
        request_t *request = make_request(self, is_write, ((const int64_t *)views[TAGS].buf)[done],
                                          ((const int64_t *)views[OFFSETS].buf)[done], pieces, count);
        if (request == NULL) {
            PyErr_NoMemory();
            return -1;
        }
        push(made, request);
        pieces += 2 * count;
        left -= count;
        done++;
    }
    if (fits && done == num_requests && left == 0 && views[PIECES].len % 16 == 0)
        return done;
    PyErr_SetString(PyExc_ValueError, "tags, offsets, counts and pieces do not go with each other");
    return -1;
}

/* ---------------------------------------------------------------- methods */

static PyObject *submit(PyObject *object, PyObject *args)
{
    static const char *const formats[NUM_VIEWS] = {"lq", "lq", "i", "LQ"};
    aio_t *self = (aio_t *)object;
    PyObject *objects[NUM_VIEWS];
    Py_buffer views[NUM_VIEWS];
    queue_t made = {NULL, NULL};
    Py_ssize_t num_requests = -1;
    int is_write, got = 0;
    if (!PyArg_ParseTuple(args, "pOOOO:submit", &is_write, &objects[0], &objects[1], &objects[2], &objects[3])
        || enter(self) < 0)
        return NULL;
    while (got < NUM_VIEWS && get_numbers(objects[got], &views[got], formats[got]) == 0)
        got++;
    if (self->is_closing)
        PyErr_SetString(PyExc_ValueError, "submit: closed");
    else if (got == NUM_VIEWS)
        num_requests = make_requests(self, is_write, views, &made);
    while (got > 0)
        PyBuffer_Release(&views[--got]);
    if (num_requests < 0)
        free_all(&made);
    while (made.first != NULL)
        push(&self->waiting, pop(&made));
    if (num_requests > 0) {
        self->in_flight += num_requests;
        start(self);
        /* A caller that submits for long before it collects must not find the disk idle: what has ended makes room. */
        if (self->waiting.first != NULL && reap(self, 0) > 0)
            start(self);
    }
    self->is_busy = 0;
    return num_requests < 0 ? NULL : Py_NewRef(Py_None);
}

static PyObject *collect(PyObject *object, PyObject *timeout_s)
{
    aio_t *self = (aio_t *)object;
    double deadline_s;
    if (enter_until(self, timeout_s, &deadline_s) < 0)
        return NULL;
    PyObject *list = wait_until(self, deadline_s) < 0 ? NULL : PyList_New(self->num_ended);
    request_t *request = self->ended.first;
    for (Py_ssize_t n = 0; list != NULL && n < self->num_ended; n++, request = request->next) {
        PyObject *pair = Py_BuildValue("LL", (long long)request->tag, (long long)request->result);
        if (pair == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, n, pair);
    }
    if (list != NULL)
        forget_ended(self);
    self->is_busy = 0;
    return list;
}

static PyObject *close_aio(PyObject *object, PyObject *timeout_s)
{
    aio_t *self = (aio_t *)object;
    double deadline_s;
    if (enter_until(self, timeout_s, &deadline_s) < 0)
        return NULL;
    self->is_closing = 1;
    int failed, was_over;
    do {
        was_over = now_s() >= deadline_s; /* asked first: no time at all is enough for what has ended */
        failed = wait_until(self, deadline_s) < 0;
        forget_ended(self);
    } while (!failed && !was_over && self->in_flight > 0);
    if (!failed && self->in_flight == 0 && self->context != 0)
        destroy(self);
    self->is_busy = 0;
    return failed ? NULL : PyBool_FromLong(self->in_flight == 0);
}

/* ---------------------------------------------------------------- the whole */

static PyObject *new_aio(PyTypeObject *type, PyObject *args, PyObject *names)
{
    int fd, depth;
    (void)names;
    if (!PyArg_ParseTuple(args, "ii:Aio", &fd, &depth))
        return NULL;
    aio_t *self = (aio_t *)type->tp_alloc(type, 0); /* all zero */
    if (self == NULL)
        return NULL;
    self->fd = fd;
    self->depth = depth;
    if (syscall(SYS_io_setup, (unsigned)depth, &self->context) < 0) /* EINVAL for a depth below 1 */
        PyErr_SetFromErrno(PyExc_OSError);
    else if ((self->batch = PyMem_RawCalloc((size_t)depth, sizeof *self->batch)) == NULL
             || (self->events = PyMem_RawCalloc((size_t)depth, sizeof *self->events)) == NULL)
        PyErr_NoMemory();
    if (self->events == NULL)
        Py_CLEAR(self);
    return (PyObject *)self;
}

/* As close(0), except that nothing is started any more. */
static void dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    aio_t *self = (aio_t *)object;
    free_all(&self->waiting);
    while (self->started > 0 && reap(self, 0) > 0) { }
    free_all(&self->ended);
    if (self->started == 0 && self->context != 0)
        destroy(self);
    PyMem_RawFree(self->batch);
    PyMem_RawFree(self->events);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef METHODS[] = {
    {"submit", submit, METH_VARARGS, NULL},
    {"collect", collect, METH_O, NULL},
    {"close", close_aio, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef MEMBERS[] = {
    {"in_flight", T_PYSSIZET, offsetof(aio_t, in_flight), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot SLOTS[] = {
    {Py_tp_new, (void *)new_aio}, {Py_tp_dealloc, (void *)dealloc}, {Py_tp_methods, METHODS},
    {Py_tp_members, MEMBERS}, {0, NULL},
};

static PyType_Spec SPEC = {
    .name = "kvbm_core.native._kvbm.Aio", .basicsize = sizeof(aio_t), .flags = Py_TPFLAGS_DEFAULT, .slots = SLOTS,
};

#endif

int kvbm_add_aio(PyObject *module)
{
#ifdef HAVE_AIO
    PyObject *type = PyType_FromSpec(&SPEC);
    int failed = type == NULL || PyModule_AddObjectRef(module, "Aio", type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
#else
    (void)module;
    return 0;
#endif
}
