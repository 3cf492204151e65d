/* A stand-in for libcuda.so.1, against which libraries of the CUDA build are linked. The runtime's stand-in needs no
 * driver, so a call that arrives here is one that has none, and fails: code 801 is "operation not supported". */
#define ABSENT(name) int name(void) { return 801; }
#define PRESENT(name) int name(void) { return 0; }

PRESENT(cuInit) PRESENT(cuDevicePrimaryCtxGetState)
ABSENT(cuCtxFromGreenCtx) ABSENT(cuCtxGetCurrent) ABSENT(cuCtxPopCurrent) ABSENT(cuCtxPushCurrent)
ABSENT(cuCtxSetCurrent) ABSENT(cuDevResourceGenerateDesc) ABSENT(cuDevSmResourceSplitByCount) ABSENT(cuDeviceGet)
ABSENT(cuDeviceGetAttribute) ABSENT(cuDeviceGetCount) ABSENT(cuDeviceGetDevResource) ABSENT(cuDeviceGetUuid)
ABSENT(cuDevicePrimaryCtxRetain) ABSENT(cuFuncGetAttribute) ABSENT(cuFuncSetAttribute) ABSENT(cuFuncSetCacheConfig)
ABSENT(cuGetErrorName) ABSENT(cuGetErrorString) ABSENT(cuGreenCtxCreate) ABSENT(cuGreenCtxDestroy)
ABSENT(cuGreenCtxStreamCreate) ABSENT(cuLaunchCooperativeKernel) ABSENT(cuLaunchKernel) ABSENT(cuLinkAddData_v2)
ABSENT(cuLinkComplete) ABSENT(cuLinkCreate_v2) ABSENT(cuMemAddressFree) ABSENT(cuMemAddressReserve)
ABSENT(cuMemCreate) ABSENT(cuMemExportToShareableHandle) ABSENT(cuMemGetAddressRange)
ABSENT(cuMemGetAddressRange_v2) ABSENT(cuMemGetAllocationGranularity)
ABSENT(cuMemGetAllocationPropertiesFromHandle) ABSENT(cuMemImportFromShareableHandle) ABSENT(cuMemMap)
ABSENT(cuMemRelease) ABSENT(cuMemRetainAllocationHandle) ABSENT(cuMemSetAccess) ABSENT(cuMemUnmap)
ABSENT(cuMemsetD32Async) ABSENT(cuModuleGetFunction) ABSENT(cuModuleLoad) ABSENT(cuModuleLoadData)
ABSENT(cuModuleLoadDataEx) ABSENT(cuModuleUnload) ABSENT(cuMulticastAddDevice) ABSENT(cuMulticastBindMem)
ABSENT(cuMulticastCreate) ABSENT(cuMulticastUnbind) ABSENT(cuOccupancyMaxActiveBlocksPerMultiprocessor)
ABSENT(cuPointerGetAttribute) ABSENT(cuStreamWriteValue32) ABSENT(cuTensorMapEncodeTiled)
