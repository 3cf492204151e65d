/* Launches. Kernels are replaced where torch chooses them (tests/emulated_gpu/kernels.py), so a launch that arrives here
 * has no stand-in: it fails, and the error names the kernel. torch.cuda._sleep is the exception. */
#include "runtime.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 1 << 16 };
#define CYCLES_PER_S 1.7e9

struct kernel {
    const void *function;
    const char *name;
    struct kernel *next;
};
static struct kernel *kernels[SLOTS];

static struct kernel **slot(const void *function) { return &kernels[((size_t)function >> 4) % SLOTS]; }

static const char *name_of(const void *function) {
    for (struct kernel *kernel = *slot(function); kernel; kernel = kernel->next)
        if (kernel->function == function) return kernel->name;
    return "?";
}

/* The functions that compiled CUDA code calls to register itself when it is loaded. */
void **__cudaRegisterFatBinary(void *binary) {
    static void *none;
    return &none;
}
void __cudaRegisterFatBinaryEnd(void **binary) {}
void __cudaUnregisterFatBinary(void **binary) {}
void __cudaRegisterVar(void) {}
status __cudaInitModule(void **binary) { return OK; }
status __cudaGetKernel(const void **kernel, const void *function) { return *kernel = function, OK; }
void __cudaRegisterFunction(void **binary, const char *function, char *address, const char *name) {
    struct kernel *kernel = malloc(sizeof *kernel);
    *kernel = (struct kernel){function, name, *slot(function)};
    *slot(function) = kernel;
}

/* Compiled code pushes what stands between <<< and >>>, and pops it before it launches. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} configuration;

status __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return OK;
}
status __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void **stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared, *stream = configuration.stream;
    return OK;
}

static double do_sleep(void *until_s) {
    double left_s = *(double *)until_s - now_s();
    return left_s > 0 ? left_s : 0;
}

static status launch(const void *function, void **arguments, void *stream) {
    const char *name = name_of(function);
    if (!strstr(name, "spin_kernel")) return fail_by_name("kernel", name);
    double until_s = now_s() + *(long *)arguments[0] / CYCLES_PER_S;
    emulated_gpu_enqueue(stream, do_sleep, &until_s, sizeof until_s);
    return OK;
}

status cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                 void *stream) {
    return launch(function, arguments, stream);
}
status __cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared,
                                   void *stream) {
    return launch(function, arguments, stream);
}
status cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) {
    return launch(function, arguments, config->stream);
}

status cudaFuncSetAttribute(const void *function, int attribute, int value) { return OK; }
status cudaFuncGetAttributes(struct cudaFuncAttributes *out, const void *function) {
    memset(out, 0, sizeof *out);
    return OK;
}
status cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks) { return *blocks = 1, OK; }
status cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks) { return *blocks = 1, OK; }

/* No stream is being captured into a graph. */
status cudaStreamIsCapturing(void *stream, int *capturing) { return *capturing = 0, OK; }
status cudaThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0, OK; }
status cudaStreamGetCaptureInfo(void *stream, int *capturing, unsigned long long *id) {
    *capturing = 0;
    if (id) *id = 0;
    return OK;
}

#define ABSENT(name) status name(void) { return fail_by_name("function", #name); }
ABSENT(cudaDeviceGetDefaultMemPool) ABSENT(cudaFreeAsync) ABSENT(cudaGetSymbolAddress)
ABSENT(cudaGraphInstantiateWithFlags) ABSENT(cudaGraphLaunch) ABSENT(cudaKernelSetAttributeForDevice)
ABSENT(cudaLaunchCooperativeKernel) ABSENT(cudaLibraryGetKernel) ABSENT(cudaLibraryLoadData) ABSENT(cudaLibraryUnload)
ABSENT(cudaMallocAsync) ABSENT(cudaMemPoolGetAttribute) ABSENT(cudaMemPoolSetAccess) ABSENT(cudaMemPoolSetAttribute)
ABSENT(cudaMemPoolTrimTo) ABSENT(cudaMemcpy2DAsync) ABSENT(cudaMemcpyToSymbol) ABSENT(cudaStreamAddCallback)
ABSENT(cudaStreamBeginCapture) ABSENT(cudaStreamBeginCaptureToGraph) ABSENT(cudaStreamCreate)
ABSENT(cudaStreamEndCapture) ABSENT(cudaStreamUpdateCaptureDependencies)
