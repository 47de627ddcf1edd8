// A libcuda.so.1 for machines without a driver, so that cuDNN's runtime-compiled engines load and their plans can be built:
// every call succeeds and does nothing. Only cudnn_plans.py uses it.
#define NOTHING(f) int f(void) { return 0; }
#define HANDLE(f) int f(void** made) { *made = (void*)16; return 0; }

HANDLE(cuCtxGetCurrent)
HANDLE(cuKernelGetFunction)
HANDLE(cuLibraryGetKernel)
HANDLE(cuLibraryLoadData)
HANDLE(cuModuleGetFunction)
HANDLE(cuModuleLoadData)
NOTHING(cuCtxGetLimit)
NOTHING(cuCtxPopCurrent)
NOTHING(cuCtxPushCurrent)
NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetCount)
NOTHING(cuGetErrorName)
NOTHING(cuKernelGetAttribute)
NOTHING(cuKernelSetAttribute)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLaunchKernelEx)
NOTHING(cuLibraryLoadFromFile)
NOTHING(cuLibraryUnload)
NOTHING(cuLinkAddData)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate)
NOTHING(cuLinkDestroy)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxPotentialClusterSize)
NOTHING(cuStreamGetCtx)
NOTHING(cuTensorMapEncodeIm2col)
NOTHING(cuTensorMapEncodeTiled)

int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

int cuGetErrorString(int error, const char** text) {
  *text = "the stub of libcuda has no errors";
  return 0;
}
