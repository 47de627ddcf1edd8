"""The properties of a GPU as cuDNN writes them down, from which it plans without the GPU itself."""

import json

_HOPPER = dict(
    cudaDeviceId=0, deviceVer=900, driverVer=13000, maxGridSize=[2**31 - 1, 65535, 65535], maxBlockSize=[1024, 1024, 64],
    regsPerBlock=65536, multiProcessorCount=132, smClockRateKHz=1_980_000, l2CacheSize=50 * 2**20, warpSize=32,
    maxSharedMemoryPerBlock=49152, maxSharedMemoryPerBlockOptin=232448, reservedSharedMemoryPerBlock=1024,
    oversizedSharedMemoryPerBlock=0, maxRegistersPerSM=65536, pciDeviceId=0, maxCtasPerSM=32, maxThreadsPerBlock=1024,
    maxThreadsPerSM=2048, isTccDriver=0, supportCoopLaunch=1)

# Written from published figures, not by a device.
KNOWN = {
    "H100": json.dumps(_HOPPER | dict(
        deviceName="NVIDIA H100 80GB HBM3", memClockRateKHz=2_619_000, memoryBusWidth=5120, totalGlobalMem=85_029_158_912)),
    "H200": json.dumps(_HOPPER | dict(
        deviceName="NVIDIA H200", memClockRateKHz=3_201_000, memoryBusWidth=6144, totalGlobalMem=151_397_597_184)),
}
