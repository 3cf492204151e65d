/* Streams, events and copies.
 *
 * A stream is a queue of work. Work is done when the program waits for it, and before that only by chance: calls of the
 * runtime do some of a random stream's work, in an order drawn from EMULATED_GPU_SEED. Seed 0 does nothing early, and
 * with EMULATED_GPU_LATE=0 nothing is late. A kernel (tests/emulated_gpu/kernels.py) runs when it is launched, after
 * its stream's work. */
#include "runtime.h"
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { STREAMS = 4096, MARK = 0x57a3a };

struct work {
    struct work *next;
    long number;
    attempt work;
    char state[];
};
struct stream {
    int mark;
    struct work *first, *last;
    long issued, done; /* numbers of the last work that was issued and done */
};
struct event {
    struct stream *stream; /* NULL until it is recorded */
    long number;
    double at_s;
};

static struct stream streams[STREAMS]; /* the first DEVICES are the default streams; none is freed: events name them */
static int stream_count = DEVICES;

double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}

static void pause_s(double seconds) {
    struct timespec left = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    while (nanosleep(&left, &left) && errno == EINTR) {}
}

/* Handles 0 and 1 are the default stream of the current device. */
static struct stream *stream_of(void *handle) {
    struct stream *stream = (uintptr_t)handle <= 1 ? &streams[current_device] : handle;
    if (stream >= streams + DEVICES && (stream >= streams + STREAMS || stream->mark != MARK)) abort();
    return stream;
}

/* ---- chance */

static uint64_t random_state;
static int odds; /* one in so many calls does work early; 0: none */
static int late = -1;

void emulated_gpu_seed(long seed) {
    pthread_mutex_lock(&lock);
    random_state = seed;
    odds = seed ? 2 << seed % 4 : 0;
    late = setting("EMULATED_GPU_LATE", 1);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void seed_from_environment(void) {
    emulated_gpu_seed(setting("EMULATED_GPU_SEED", 0));
}

static unsigned draw(unsigned below) { /* splitmix64 (Steele, Lea and Flood 2014) */
    uint64_t z = random_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
}

/* ---- work; `lock` is held */

/* Do a stream's work up to a number. Returns 0 when it is done, or after how many seconds to try again. */
static double progress(struct stream *stream, long number) {
    while (stream->done < number) {
        struct work *first = stream->first;
        double wait_s = first->work(first->state);
        if (wait_s > 0) return wait_s;
        stream->done = first->number;
        if (!(stream->first = first->next)) stream->last = NULL;
        free(first);
    }
    return 0;
}

static void by_chance(void) {
    int busy = 0;
    if (!odds || draw(odds)) return;
    for (int i = 0; i < stream_count; i++) busy += streams[i].issued > streams[i].done;
    if (!busy) return;
    struct stream *stream = streams;
    for (int skip = draw(busy);; stream++)
        if (stream->issued > stream->done && !skip--) break;
    progress(stream, stream->done + 1 + draw(stream->issued - stream->done));
}

static void append(struct stream *stream, attempt work, const void *state, size_t size) {
    struct work *last = malloc(sizeof *last + size);
    last->next = NULL, last->number = ++stream->issued, last->work = work;
    if (size) memcpy(last->state, state, size);
    if (stream->last) stream->last->next = last;
    else stream->first = last;
    stream->last = last;
    by_chance();
}

void emulated_gpu_enqueue(void *handle, attempt work, const void *state, size_t size) {
    pthread_mutex_lock(&lock);
    append(stream_of(handle), work, state, size);
    pthread_mutex_unlock(&lock);
    if (!late) finish(handle);
}

/* While the host waits for work that cannot be done yet, the other streams go on, as they do on a GPU. */
static void wait_for(struct stream *stream, long number) {
    for (;;) {
        pthread_mutex_lock(&lock);
        double wait_s = progress(stream, number);
        for (int i = 0; wait_s && i < stream_count; i++) progress(&streams[i], streams[i].issued);
        pthread_mutex_unlock(&lock);
        if (!wait_s) return;
        pause_s(wait_s); /* without the lock: another thread may do the work meanwhile */
    }
}

void finish(void *handle) {
    struct stream *stream = stream_of(handle);
    wait_for(stream, stream->issued);
}

void finish_all(void) {
    for (int i = 0; i < stream_count; i++) wait_for(&streams[i], streams[i].issued);
}

void emulated_gpu_finish(void *handle) { finish(handle); }

/* Whether work up to a number is done. A program that asks again and again is answered yes at some time. */
static status query(struct stream *stream, long number) {
    pthread_mutex_lock(&lock);
    if (draw(2)) progress(stream, number);
    int done = stream->done >= number;
    pthread_mutex_unlock(&lock);
    return done ? OK : NOT_READY; /* which is no error that cudaGetLastError would return */
}

/* ---- copies */

struct copy {
    void *to;
    const void *from; /* NULL: fill with `value` */
    size_t size;
    int value;
};

static double do_copy(void *state) {
    struct copy *copy = state;
    if (copy->from) memmove(copy->to, copy->from, copy->size);
    else memset(copy->to, copy->value, copy->size);
    return 0;
}

/* A copy is late unless one end is ordinary memory of the host: then the runtime copies before the call returns. */
status cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    status code = context();
    if (code) return code;
    struct copy copy = {to, from, size, 0};
    pthread_mutex_lock(&lock);
    int may_be_late = is_registered(to) && is_registered(from);
    pthread_mutex_unlock(&lock);
    emulated_gpu_enqueue(stream, do_copy, &copy, sizeof copy);
    if (!may_be_late) finish(stream);
    return OK;
}

status cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    status code = cudaMemcpyAsync(to, from, size, kind, NULL);
    finish(NULL);
    return code;
}

status cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                    void *stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDeviceToDevice, stream);
}

status cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    status code = context();
    struct copy copy = {to, NULL, size, value};
    if (!code) emulated_gpu_enqueue(stream, do_copy, &copy, sizeof copy);
    return code;
}

status cudaMemset(void *to, int value, size_t size) { return cudaMemsetAsync(to, value, size, NULL); }

/* ---- streams */

/* torch's streams do not wait for the default stream. Those that do would need a wait here, before and after work. */
status cudaStreamCreateWithPriority(void **out, unsigned flags, int priority) {
    status code = context();
    if (code) return code;
    if (flags != cudaStreamNonBlocking) return fail_by_name("function", "cudaStreamCreate without cudaStreamNonBlocking");
    pthread_mutex_lock(&lock);
    if (stream_count == STREAMS) abort();
    streams[stream_count].mark = MARK;
    *out = &streams[stream_count++];
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaStreamCreateWithFlags(void **out, unsigned flags) {
    return cudaStreamCreateWithPriority(out, flags, 0);
}

status cudaStreamDestroy(void *stream) { return finish(stream), OK; }
status cudaStreamSynchronize(void *stream) { return finish(stream), context(); }
status cudaDeviceSynchronize(void) { return finish_all(), context(); }
status cudaStreamQuery(void *stream) { return query(stream_of(stream), stream_of(stream)->issued); }
status cudaStreamGetPriority(void *stream, int *priority) { return *priority = 0, OK; }
status cudaDeviceGetStreamPriorityRange(int *least, int *most) { return *least = 0, *most = -5, OK; }

struct call {
    void (*function)(void *);
    void *data;
};

static double do_call(void *state) {
    struct call *call = state;
    call->function(call->data); /* which may not call the runtime */
    return 0;
}

status cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
    struct call call = {function, data};
    return emulated_gpu_enqueue(stream, do_call, &call, sizeof call), OK;
}

/* ---- events */

static double do_nothing(void *state) { return 0; }

struct dependency {
    struct stream *stream;
    long number;
};

static double do_wait(void *state) {
    struct dependency *on = state;
    return progress(on->stream, on->number);
}

status cudaEventCreateWithFlags(void **out, unsigned flags) {
    status code = context();
    if (!code) *out = calloc(1, sizeof(struct event));
    return code;
}

status cudaEventCreate(void **out) { return cudaEventCreateWithFlags(out, 0); }
status cudaIpcOpenEventHandle(void **out, cudaIpcEventHandle_t handle) { return cudaEventCreate(out); }

status cudaEventDestroy(void *event) {
    free(event);
    return OK;
}

status cudaEventRecordWithFlags(struct event *event, void *handle, unsigned flags) {
    status code = context();
    if (code) return code;
    struct stream *stream = stream_of(handle);
    pthread_mutex_lock(&lock);
    append(stream, do_nothing, NULL, 0); /* an event is late even if its stream has no other work */
    *event = (struct event){stream, stream->issued, now_s()};
    pthread_mutex_unlock(&lock);
    if (!late) wait_for(event->stream, event->number);
    return OK;
}

status cudaEventRecord(struct event *event, void *stream) { return cudaEventRecordWithFlags(event, stream, 0); }

status cudaEventSynchronize(struct event *event) {
    if (event->stream) wait_for(event->stream, event->number);
    return context();
}

status cudaEventQuery(struct event *event) { return event->stream ? query(event->stream, event->number) : OK; }

status cudaStreamWaitEvent(void *stream, struct event *event, unsigned flags) {
    struct dependency on = {event->stream, event->number};
    if (on.stream) emulated_gpu_enqueue(stream, do_wait, &on, sizeof on);
    return context();
}

/* The time between the calls that recorded the events. It says nothing about a GPU. */
status cudaEventElapsedTime(float *ms, struct event *begin, struct event *end) {
    *ms = (end->at_s - begin->at_s) * 1e3;
    return OK;
}
