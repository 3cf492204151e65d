/* A stand-in for libnccl.so.2 on one host: what services/policy_trainer/worker/weights/nccl.py and vLLM's
 * PyNcclCommunicator call. Ranks meet in a file of /dev/shm that is named after the unique id.
 *
 * Collectives are work of their streams, and must come in the same order on all ranks: NCCL would hang or mix up their
 * data; here, the communicator fails. A peer that never joins, never sends or aborts is waited for until the own
 * communicator is aborted, and no error is reported, as by NCCL between GPUs of one host. */
#include "runtime.h"
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, INVALID_USAGE = 5, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { RANKS = 16, FLOAT32 = 7, SUM = 0, ALL_REDUCE = 1, BROADCAST = 2 };
#define RETRY_S 0.001

typedef struct {
    char name[128];
} unique_id;

struct call { /* what must be equal on all ranks */
    int function, dtype, operand; /* the reduction or the root */
    size_t count;
};
struct member {
    long given, taken;      /* numbers of the last collectives whose data this rank has given and taken */
    struct call calls[2];   /* the last two: no rank is further ahead of another */
};
struct meeting { /* at the beginning of the file; the data of rank r begins at data_at(r) */
    int joined, aborted;
    struct member members[RANKS];
};
struct communicator { /* never freed, because work of streams names it */
    struct meeting *meeting;
    int fd, rank, ranks, error, aborted;
    long issued;
};
struct collective {
    struct communicator *communicator;
    struct call call;
    long number;
    const void *from;
    void *to;
    size_t size;
};

static off_t data_at(int rank) { return (off_t)(rank + 1) << 32; }

static size_t size_of(int dtype) {
    static const size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return dtype >= 0 && dtype < (int)(sizeof sizes / sizeof *sizes) ? sizes[dtype] : 0;
}

static int all_at_least(const struct communicator *c, long number, size_t field) {
    for (int rank = 0; rank < c->ranks; rank++) {
        const char *member = (const char *)&c->meeting->members[rank];
        if (__atomic_load_n((const long *)(member + field), __ATOMIC_ACQUIRE) < number) return 0;
    }
    return 1;
}

static void take(const struct collective *w) {
    const struct communicator *c = w->communicator;
    if (w->call.function == BROADCAST) {
        if (c->rank != w->call.operand && pread(c->fd, w->to, w->size, data_at(w->call.operand)) != (ssize_t)w->size)
            abort();
        if (c->rank == w->call.operand && w->to != w->from) memmove(w->to, w->from, w->size);
        return;
    }
    float *sum = calloc(w->call.count, sizeof *sum), *part = malloc(w->size);
    for (int rank = 0; rank < c->ranks; rank++) {
        if (pread(c->fd, part, w->size, data_at(rank)) != (ssize_t)w->size) abort();
        for (size_t i = 0; i < w->call.count; i++) sum[i] += part[i];
    }
    memcpy(w->to, sum, w->size);
    free(sum), free(part);
}

static double do_collective(void *state) {
    struct collective *w = state;
    struct communicator *c = w->communicator;
    struct member *own = &c->meeting->members[c->rank];
    if (c->error || __atomic_load_n(&c->aborted, __ATOMIC_ACQUIRE)) return 0;
    if (own->given < w->number) {
        int gives = w->call.function == ALL_REDUCE || c->rank == w->call.operand;
        if (gives && pwrite(c->fd, w->from, w->size, data_at(c->rank)) != (ssize_t)w->size) abort();
        own->calls[w->number % 2] = w->call;
        __atomic_store_n(&own->given, w->number, __ATOMIC_RELEASE);
    }
    if (!all_at_least(c, w->number, offsetof(struct member, given))) return RETRY_S;
    if (own->taken < w->number) {
        for (int rank = 0; rank < c->ranks; rank++)
            if (memcmp(&c->meeting->members[rank].calls[w->number % 2], &w->call, sizeof w->call)) {
                fprintf(stderr, "emulated NCCL: collective %ld is another one on rank %d than on %d\n", w->number, rank,
                        c->rank);
                c->error = INVALID_USAGE;
                return 0;
            }
        take(w);
        __atomic_store_n(&own->taken, w->number, __ATOMIC_RELEASE);
    }
    return all_at_least(c, w->number, offsetof(struct member, taken)) ? 0 : RETRY_S;
}

static int issue(int function, const void *from, void *to, size_t count, int dtype, int operand,
                 struct communicator *c, void *stream) {
    struct collective w;
    memset(&w, 0, sizeof w); /* calls are compared byte by byte */
    w.communicator = c, w.from = from, w.to = to, w.size = count * size_of(dtype), w.number = ++c->issued;
    w.call.function = function, w.call.dtype = dtype, w.call.operand = operand, w.call.count = count;
    if (!w.size) return INVALID_ARGUMENT;
    emulated_gpu_enqueue(stream, do_collective, &w, sizeof w);
    return SUCCESS;
}

int ncclAllReduce(const void *from, void *to, size_t count, int dtype, int operation, struct communicator *c,
                  void *stream) {
    if (dtype != FLOAT32 || operation != SUM) return INVALID_ARGUMENT; /* the only reduction that has a stand-in */
    return issue(ALL_REDUCE, from, to, count, dtype, operation, c, stream);
}

int ncclBroadcast(const void *from, void *to, size_t count, int dtype, int root, struct communicator *c, void *stream) {
    return issue(BROADCAST, from, to, count, dtype, root, c, stream);
}

/* ---- communicators */

int ncclGetVersion(int *version) { return *version = 22900, SUCCESS; }

int ncclGetUniqueId(unique_id *out) {
    uint64_t number;
    const char *run = getenv("EMULATED_GPU_RUN");
    if (getrandom(&number, sizeof number, 0) != sizeof number) return SYSTEM_ERROR;
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "/dev/shm/emulated-nccl-%.32s-%016lx", run ? run : "default", number);
    return SUCCESS;
}

static int has_joined(const struct communicator *c) {
    return __atomic_load_n(&c->meeting->joined, __ATOMIC_ACQUIRE) == c->ranks;
}

/* Waits for no peer: `ncclCommGetAsyncError` says when all have joined. An id that was aborted is not valid again. */
int ncclCommInitRankConfig(struct communicator **out, int ranks, unique_id id, int rank, void *config) {
    struct communicator *c = calloc(1, sizeof *c);
    if (ranks > RANKS || rank >= ranks) return INVALID_ARGUMENT;
    c->fd = open(id.name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (c->fd < 0 || ftruncate(c->fd, data_at(RANKS))) return SYSTEM_ERROR;
    c->meeting = mmap(NULL, sizeof *c->meeting, PROT_READ | PROT_WRITE, MAP_SHARED, c->fd, 0);
    if (c->meeting == MAP_FAILED) return SYSTEM_ERROR;
    c->rank = rank, c->ranks = ranks;
    *out = c;
    if (c->meeting->aborted) return REMOTE_ERROR;
    __atomic_fetch_add(&c->meeting->joined, 1, __ATOMIC_ACQ_REL);
    return IN_PROGRESS;
}

int ncclCommInitRank(struct communicator **out, int ranks, unique_id id, int rank) {
    int code = ncclCommInitRankConfig(out, ranks, id, rank, NULL);
    while (code == IN_PROGRESS && !has_joined(*out)) usleep(1000);
    return code == IN_PROGRESS ? SUCCESS : code;
}

int ncclCommGetAsyncError(struct communicator *c, int *state) {
    *state = c->error ? c->error : has_joined(c) ? SUCCESS : IN_PROGRESS;
    return SUCCESS;
}

int ncclCommAbort(struct communicator *c) {
    __atomic_store_n(&c->aborted, 1, __ATOMIC_RELEASE);
    __atomic_store_n(&c->meeting->aborted, 1, __ATOMIC_RELEASE);
    return SUCCESS;
}

int ncclCommDestroy(struct communicator *c) { return SUCCESS; }

const char *ncclGetErrorString(int code) {
    switch (code) {
    case SUCCESS: return "no error";
    case SYSTEM_ERROR: return "unhandled system error";
    case INVALID_ARGUMENT: return "invalid argument";
    case INVALID_USAGE: return "invalid usage";
    case REMOTE_ERROR: return "remote process exited or there was a network error";
    case IN_PROGRESS: return "NCCL operation in progress";
    default: return "internal error";
    }
}

const char *ncclGetLastError(struct communicator *c) { return ncclGetErrorString(c ? c->error : SUCCESS); }

#define ABSENT(name) int name(void) { return fprintf(stderr, "emulated NCCL: no stand-in for %s\n", #name), INVALID_USAGE; }
ABSENT(ncclAllGather) ABSENT(ncclAlltoAll) ABSENT(ncclBcast) ABSENT(ncclCommCount) ABSENT(ncclCommDeregister)
ABSENT(ncclCommFinalize) ABSENT(ncclCommInitAll) ABSENT(ncclCommInitRankScalable) ABSENT(ncclCommMemStats)
ABSENT(ncclCommRegister) ABSENT(ncclCommResume) ABSENT(ncclCommShrink) ABSENT(ncclCommSplit) ABSENT(ncclCommSuspend)
ABSENT(ncclCommUserRank) ABSENT(ncclCommWindowDeregister) ABSENT(ncclCommWindowRegister) ABSENT(ncclDevCommCreate)
ABSENT(ncclDevCommDestroy) ABSENT(ncclGetLsaMultimemDevicePointer) ABSENT(ncclGetPeerDevicePointer)
ABSENT(ncclGroupEnd) ABSENT(ncclGroupSimulateEnd) ABSENT(ncclGroupStart) ABSENT(ncclMemAlloc) ABSENT(ncclMemFree)
ABSENT(ncclPutSignal) ABSENT(ncclRecv) ABSENT(ncclRedOpCreatePreMulSum) ABSENT(ncclRedOpDestroy) ABSENT(ncclReduce)
ABSENT(ncclReduceScatter) ABSENT(ncclSend) ABSENT(ncclSignal) ABSENT(ncclWaitSignal)
