/* Which GPUs this process sees, their properties, contexts, and errors. */
#include "runtime.h"
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
__thread int current_device;
int visible[DEVICES];
size_t device_bytes;

static int count = -1; /* of visible devices */
static int owner;      /* the process that made the context */
static __thread status last;
static __thread char message[400];

long setting(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

void device_uuid(int number, char *text) { sprintf(text, "GPU-e0e0e0e0-0000-4000-8000-%012x", number); }

static int device_named(const char *name, int all) {
    char *end, uuid[64];
    long number = strtol(name, &end, 10);
    if (end != name && !*end) return number >= 0 && number < all ? (int)number : -1;
    for (int i = 0; i < all; i++) {
        device_uuid(i, uuid);
        if (!strcmp(uuid, name)) return i;
    }
    return -1;
}

/* As in CUDA, CUDA_VISIBLE_DEVICES is read once, and the first name of no device hides the rest. */
static void look(void) {
    if (count >= 0) return;
    int all = setting("EMULATED_GPU_COUNT", 1), seen = 0;
    const char *names = getenv("CUDA_VISIBLE_DEVICES");
    device_bytes = setting("EMULATED_GPU_BYTES", 141l << 30);
    if (!names) {
        for (; seen < all && seen < DEVICES; seen++) visible[seen] = seen;
    } else {
        char copy[1024], *rest = copy, *name;
        snprintf(copy, sizeof copy, "%s", names);
        while ((name = strsep(&rest, ",")) && seen < DEVICES) {
            int number = device_named(name, all);
            if (number < 0) break;
            visible[seen++] = number;
        }
    }
    count = seen;
}

status context(void) {
    look();
    if (!count) return fail(NO_DEVICE);
    int none = 0, self = getpid();
    __atomic_compare_exchange_n(&owner, &none, self, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return owner == self ? OK : fail(NOT_INITIALISED);
}

status cudaGetDeviceCount(int *n) {
    look();
    *n = count;
    return count ? OK : fail(NO_DEVICE);
}

status cudaGetDevice(int *device) {
    *device = current_device;
    return OK;
}

status cudaSetDevice(int device) {
    look();
    if (device < 0 || device >= count) return fail(INVALID_DEVICE);
    current_device = device;
    return context();
}

status cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    look();
    if (device < 0 || device >= count) return fail(INVALID_DEVICE);
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Emulated GPU (host memory)");
    memcpy(p->uuid.bytes, "\xe0\xe0\xe0\xe0\0\0\x40\0\x80\0\0\0\0\0\0", 16);
    p->uuid.bytes[15] = visible[device];
    p->major = 9, p->minor = 0;
    p->totalGlobalMem = device_bytes, p->totalConstMem = 64 << 10, p->l2CacheSize = 60 << 20;
    p->multiProcessorCount = 132, p->warpSize = 32;
    p->sharedMemPerBlock = 48 << 10, p->sharedMemPerBlockOptin = 227 << 10, p->sharedMemPerMultiprocessor = 228 << 10;
    p->regsPerBlock = p->regsPerMultiprocessor = 64 << 10;
    p->maxThreadsPerBlock = 1024, p->maxThreadsPerMultiProcessor = 2048, p->maxBlocksPerMultiProcessor = 32;
    p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->unifiedAddressing = p->canMapHostMemory = p->concurrentKernels = 1;
    p->asyncEngineCount = 3, p->memoryBusWidth = 6144, p->textureAlignment = 512, p->pciBusID = visible[device] + 1;
    return OK;
}

status cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    status code = cudaGetDeviceProperties(&p, device);
    if (code) return code;
    switch (attribute) {
    case cudaDevAttrMaxThreadsPerBlock: *value = p.maxThreadsPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    default: *value = 0;
    }
    return OK;
}

status cudaDeviceGetPCIBusId(char *text, int size, int device) {
    look();
    if (device < 0 || device >= count) return fail(INVALID_DEVICE);
    snprintf(text, size, "0000:%02x:00.0", visible[device] + 1);
    return OK;
}

status cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return OK;
}

status cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return OK; }
status cudaDriverGetVersion(int *version) { return *version = 13000, OK; }
status cudaRuntimeGetVersion(int *version) { return *version = 13000, OK; }
status cudaProfilerStart(void) { return OK; }
status cudaProfilerStop(void) { return OK; }

/* torch asks for functions of the driver by name, for example to describe a lack of memory. */
status cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                 unsigned long long flags, int *outcome) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_GLOBAL);
    *function = driver ? dlsym(driver, name) : NULL;
    if (outcome) *outcome = *function ? 0 : 1;
    return OK;
}

/* ---- errors */

status fail(status code) { return last = code; }

status fail_by_name(const char *what, const char *name) {
    snprintf(message, sizeof message, "emulated GPU: no stand-in for the %s %.300s", what, name);
    return fail(NOT_SUPPORTED);
}

status cudaPeekAtLastError(void) { return last; }

status cudaGetLastError(void) {
    status was = last;
    last = OK;
    return was;
}

const char *cudaGetErrorString(status code) {
    switch (code) {
    case OK: return "no error";
    case INVALID_VALUE: return "invalid argument";
    case OUT_OF_MEMORY: return "out of memory";
    case NOT_INITIALISED: return "initialization error (a context cannot be used in a fork of its process)";
    case NO_DEVICE: return "no CUDA-capable device is detected";
    case INVALID_DEVICE: return "invalid device ordinal";
    case INVALID_CONTEXT: return "invalid device context";
    case INVALID_HANDLE: return "invalid resource handle";
    case NOT_READY: return "device not ready";
    case ALREADY_LOCKED: return "part or all of the requested memory range is already mapped";
    case NOT_LOCKED: return "pointer does not correspond to a registered memory region";
    case NOT_SUPPORTED: return *message ? message : "operation not supported";
    default: return "unrecognized error code";
    }
}

const char *cudaGetErrorName(status code) { return cudaGetErrorString(code); }
