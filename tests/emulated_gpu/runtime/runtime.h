/* A stand-in for libcudart.so.13, loaded before it (LD_PRELOAD): GPUs whose memory is host memory.
 *
 * devices.c   which GPUs this process sees, their properties, contexts, errors
 * memory.c    allocation, counted over all processes; page-locked memory; CUDA IPC
 * streams.c   streams, events and copies, which take effect late, in an order drawn from a seed
 * kernels.c   launches, which fail by name: every kernel is replaced before it is launched
 *
 * Settings are environment variables (see tests/emulated_gpu/machine.py). One lock guards all state of the process. */
#ifndef EMULATED_GPU_RUNTIME_H
#define EMULATED_GPU_RUNTIME_H
#define _GNU_SOURCE
#include "driver_types.h"
#include <pthread.h>
#include <stddef.h>

typedef int status; /* a cudaError_t */
enum {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALISED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ALREADY_LOCKED = 712, NOT_LOCKED = 713,
    NOT_SUPPORTED = 801
};
enum { DEVICES = 16 };

#pragma GCC visibility push(hidden) /* the names below are not seen by what is loaded later */
extern pthread_mutex_t lock;
extern __thread int current_device;

/* ---- devices.c */
extern int visible[DEVICES]; /* the machine's number of each visible device */
extern size_t device_bytes;
long setting(const char *name, long otherwise);
status fail(status code);
status fail_by_name(const char *what, const char *name);
status context(void); /* of the current device; fails in a fork of the process that made it */
void device_uuid(int number, char *text);

/* ---- memory.c */
int is_registered(const void *address); /* device or page-locked memory; `lock` is held */

/* ---- streams.c */

/* Tries to do work of a stream. Returns 0 when it is done, or after how many seconds to try again. `lock` is held. */
typedef double (*attempt)(void *state);

void finish(void *stream); /* wait for all work of a stream */
void finish_all(void);
double now_s(void);
#pragma GCC visibility pop

/* Append work to a stream, with a copy of its state. It is done some time before the stream is next waited for. */
void emulated_gpu_enqueue(void *stream, attempt work, const void *state, size_t size);
void emulated_gpu_finish(void *stream);  /* called before each kernel of the stream */
void emulated_gpu_seed(long seed);       /* begins a new order of late work */
#endif
