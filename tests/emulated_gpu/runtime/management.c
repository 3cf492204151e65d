/* A stand-in for libnvidia-ml.so.1, with which torch counts GPUs before it makes a context, and describes a lack of
 * memory. Code 3 is "not supported". */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int status;
typedef void *device; /* the device's number + 1 */

static device numbered(int number) { return (device)(intptr_t)(number + 1); }

status nvmlInit(void) { return 0; }
status nvmlInit_v2(void) { return 0; }
status nvmlShutdown(void) { return 0; }
status nvmlSystemGetCudaDriverVersion_v2(int *version) { return *version = 13000, 0; }
status nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.00"), 0; }

status nvmlDeviceGetCount_v2(int *count) {
    const char *text = getenv("EMULATED_GPU_COUNT");
    return *count = text ? atoi(text) : 1, 0;
}
status nvmlDeviceGetHandleByIndex_v2(int number, device *out) { return *out = numbered(number), 0; }
status nvmlDeviceGetHandleByPciBusId_v2(const char *bus, device *out) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x", &domain, &number) != 2) return 2;
    return *out = numbered((int)number - 1), 0;
}
status nvmlDeviceGetUUID(device device, char *text, unsigned size) {
    return snprintf(text, size, "GPU-e0e0e0e0-0000-4000-8000-%012lx", (long)device - 1), 0;
}
status nvmlDeviceGetNvLinkRemoteDeviceType(void) { return 3; }
status nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return 3; }
status nvmlDeviceGetComputeRunningProcesses(device device, unsigned *count, void *out) { return *count = 0, 0; }
status nvmlDeviceGetComputeRunningProcesses_v3(device device, unsigned *count, void *out) { return *count = 0, 0; }
