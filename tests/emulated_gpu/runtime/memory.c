/* Memory of devices, counted over all processes; page-locked memory of the host; CUDA IPC.
 *
 * Memory of a device is a memfd, so that another process can open it while its owner lives. */
#include "runtime.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PROCESSES = 256 };
#define GRAIN (2ul << 20)
#define POISONED (8ul << 20) /* bytes of an allocation that are filled: memory of a GPU is not zero at first */

/* ---- the use of a device by all processes: a file that they share */

struct share {
    int pid;
    size_t used;
};
struct ledger {
    int fd;
    struct share *shares;
};
static struct ledger ledgers[DEVICES];

static struct ledger *ledger_of(int number) {
    struct ledger *ledger = &ledgers[number];
    if (!ledger->shares) {
        char name[128];
        const char *run = getenv("EMULATED_GPU_RUN");
        snprintf(name, sizeof name, "/dev/shm/emulated-gpu-%s-%d", run ? run : "default", number);
        ledger->fd = open(name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
        if (ledger->fd < 0 || ftruncate(ledger->fd, PROCESSES * sizeof(struct share))) abort();
        ledger->shares =
            mmap(NULL, PROCESSES * sizeof(struct share), PROT_READ | PROT_WRITE, MAP_SHARED, ledger->fd, 0);
        if (ledger->shares == MAP_FAILED) abort();
    }
    return ledger;
}

/* Add `change` to the bytes of this process, if the device has room. Return the bytes that are free then. */
static size_t account(int number, intptr_t change, int *fits) {
    struct ledger *ledger = ledger_of(number);
    struct share *own = NULL, *unused = NULL;
    size_t used = 0;
    flock(ledger->fd, LOCK_EX);
    for (struct share *share = ledger->shares; share < ledger->shares + PROCESSES; share++) {
        if (share->pid && share->pid != getpid() && kill(share->pid, 0) && errno == ESRCH)
            *share = (struct share){0}; /* the driver frees the memory of a dead process */
        if (share->pid == getpid()) own = share;
        if (!share->pid && !unused) unused = share;
        used += share->used;
    }
    if (!own) {
        if (!unused) abort();
        own = unused;
        own->pid = getpid();
    }
    *fits = change <= 0 || used + change <= device_bytes;
    if (*fits) own->used += change, used += change;
    flock(ledger->fd, LOCK_UN);
    return device_bytes > used ? device_bytes - used : 0;
}

/* ---- the ranges of this process */

enum origin { ALLOCATED, OPENED, HOST_ALLOCATED, HOST_REGISTERED };
struct range {
    char *begin;
    size_t size;
    enum origin origin;
    int device, fd;
    struct range *next;
};
static struct range *ranges;

static int on_device(const struct range *range) { return range->origin == ALLOCATED || range->origin == OPENED; }

static struct range *range_at(const void *address) {
    for (struct range *range = ranges; range; range = range->next)
        if ((char *)address >= range->begin && (char *)address < range->begin + range->size) return range;
    return NULL;
}

int is_registered(const void *address) { return range_at(address) != NULL; }

static void remember(void *begin, size_t size, enum origin origin, int fd) {
    struct range *range = malloc(sizeof *range);
    *range = (struct range){begin, size, origin, current_device, fd, ranges};
    ranges = range;
}

/* As in CUDA, freeing waits for all work. */
static status forget(void *begin, status otherwise) {
    finish_all();
    pthread_mutex_lock(&lock);
    struct range **link = &ranges, *gone;
    while (*link && (*link)->begin != begin) link = &(*link)->next;
    if ((gone = *link)) {
        *link = gone->next;
        if (gone->origin == ALLOCATED) {
            int fits;
            account(visible[gone->device], -(intptr_t)gone->size, &fits);
            close(gone->fd);
        }
        if (gone->origin != HOST_REGISTERED) munmap(gone->begin, gone->size);
        free(gone);
    }
    pthread_mutex_unlock(&lock);
    return gone ? OK : fail(otherwise);
}

/* ---- devices */

status cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    int fits;
    if (context()) return NOT_INITIALISED;
    pthread_mutex_lock(&lock);
    *free_bytes = account(visible[current_device], 0, &fits);
    pthread_mutex_unlock(&lock);
    *total = device_bytes;
    return OK;
}

status cudaMalloc(void **address, size_t size) {
    status code = context();
    if (code) return code;
    int fits;
    size = (size + GRAIN - 1) / GRAIN * GRAIN;
    pthread_mutex_lock(&lock);
    account(visible[current_device], size, &fits);
    if (fits) {
        int fd = memfd_create("emulated-gpu", MFD_CLOEXEC);
        if (fd < 0 || ftruncate(fd, size)) abort();
        *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (*address == MAP_FAILED) abort();
        memset(*address, 0xff, size < POISONED ? size : POISONED);
        remember(*address, size, ALLOCATED, fd);
    }
    pthread_mutex_unlock(&lock);
    return fits ? OK : fail(OUT_OF_MEMORY);
}

status cudaFree(void *address) { return address ? forget(address, INVALID_VALUE) : context(); }

/* ---- the host */

status cudaHostAlloc(void **address, size_t size, unsigned flags) {
    status code = context();
    if (code) return code;
    size = size ? size : 1;
    *address = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (*address == MAP_FAILED) return fail(OUT_OF_MEMORY);
    pthread_mutex_lock(&lock);
    remember(*address, size, HOST_ALLOCATED, -1);
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaFreeHost(void *address) { return address ? forget(address, INVALID_VALUE) : OK; }

status cudaHostRegister(void *begin, size_t size, unsigned flags) {
    status code = context();
    if (code) return code;
    pthread_mutex_lock(&lock);
    int there = is_registered(begin);
    if (!there) remember(begin, size, HOST_REGISTERED, -1);
    pthread_mutex_unlock(&lock);
    return there ? fail(ALREADY_LOCKED) : OK;
}

status cudaHostUnregister(void *begin) { return forget(begin, NOT_LOCKED); }

status cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *address) {
    pthread_mutex_lock(&lock);
    const struct range *range = range_at(address);
    memset(a, 0, sizeof *a);
    a->type = !range ? cudaMemoryTypeUnregistered : on_device(range) ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    a->device = range ? range->device : -2;
    a->devicePointer = range ? (void *)address : NULL;
    a->hostPointer = range && !on_device(range) ? (void *)address : NULL;
    pthread_mutex_unlock(&lock);
    return OK;
}

/* ---- memory of another process */

struct handle {
    char mark[16];
    int pid, fd, device;
    size_t size;
};
static const char MEMORY[16] = "emulated memory", EVENT[16] = "emulated event";
_Static_assert(sizeof(struct handle) <= sizeof(cudaIpcMemHandle_t), "a handle must fit");

status cudaIpcGetMemHandle(cudaIpcMemHandle_t *out, void *address) {
    pthread_mutex_lock(&lock);
    const struct range *range = range_at(address);
    struct handle handle = {.pid = getpid()};
    int allowed = range && range->origin == ALLOCATED;
    if (allowed) handle.fd = range->fd, handle.device = visible[range->device], handle.size = range->size;
    pthread_mutex_unlock(&lock);
    if (!allowed) return fail(INVALID_VALUE);
    memcpy(handle.mark, MEMORY, sizeof MEMORY);
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return OK;
}

status cudaIpcOpenMemHandle(void **address, cudaIpcMemHandle_t given, unsigned flags) {
    status code = context();
    if (code) return code;
    struct handle handle;
    memcpy(&handle, &given, sizeof handle);
    if (memcmp(handle.mark, MEMORY, sizeof MEMORY)) return fail(INVALID_HANDLE);
    if (handle.pid == getpid()) return fail(INVALID_CONTEXT);
    if (handle.device != visible[current_device]) return fail(INVALID_VALUE);
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", handle.pid, handle.fd);
    int fd = open(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) return fail(INVALID_HANDLE);
    *address = mmap(NULL, handle.size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (*address == MAP_FAILED) return fail(INVALID_HANDLE);
    pthread_mutex_lock(&lock);
    remember(*address, handle.size, OPENED, -1);
    pthread_mutex_unlock(&lock);
    return OK;
}

status cudaIpcCloseMemHandle(void *address) { return forget(address, INVALID_VALUE); }

/* An event opened by another process is complete: its exporter may not rely on a wait there. */
status cudaIpcGetEventHandle(cudaIpcEventHandle_t *out, void *event) {
    struct handle handle = {.pid = getpid()};
    memcpy(handle.mark, EVENT, sizeof EVENT);
    memset(out, 0, sizeof *out);
    memcpy(out, &handle, sizeof handle);
    return OK;
}
