// The rest of libcudart.so.13: the device, its streams and its events.
#include <cuda_runtime_api.h>

#include <utility>

#include "queue.h"

using namespace machine;
using Hold = std::lock_guard<std::recursive_mutex>;

extern thread_local cudaError_t last_error;  // memory.cpp
cudaError_t fail(cudaError_t error);

static constexpr int VERSION = 13000, THREADS = 1024, PROCESSORS = 3, WARP = 32,
                     CACHE = 1 << 20;
static constexpr int SHARED = 48 << 10, MOST_SHARED = 227 << 10;

// Errors and versions.

API const char *cudaGetErrorName(cudaError_t error) {
    static thread_local char text[32];
    snprintf(text, sizeof text, "cudaError%d", error);
    return text;
}
API const char *cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
API cudaError_t cudaPeekAtLastError() { return last_error; }
API cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
API cudaError_t cudaDriverGetVersion(int *version) { return *version = VERSION, cudaSuccess; }
API cudaError_t cudaRuntimeGetVersion(int *version) { return *version = VERSION, cudaSuccess; }

// The device: one, as small as a device that runs the kernels may be.

API cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
API cudaError_t cudaGetDeviceCount(int *devices) { return *devices = 1, cudaSuccess; }
API cudaError_t cudaSetDevice(int device) {
    return device == 0 ? cudaSuccess : fail(cudaErrorInvalidDevice);
}
API cudaError_t cudaDeviceGetPCIBusId(char *text, int bytes, int) {
    snprintf(text, bytes, "0000:3B:00.0");
    return cudaSuccess;
}
API cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *) { return *device = 0, cudaSuccess; }
API cudaError_t cudaDeviceCanAccessPeer(int *can, int, int) { return *can = 0, cudaSuccess; }
API cudaError_t cudaDeviceGetLimit(size_t *value, cudaLimit) { return *value = 1024, cudaSuccess; }
API cudaError_t cudaDeviceSetLimit(cudaLimit, size_t) { return cudaSuccess; }

API cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr which, int) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = PROCESSORS; break;
    case cudaDevAttrL2CacheSize: *value = CACHE; break;
    case cudaDevAttrWarpSize: *value = WARP; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = SHARED; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = MOST_SHARED; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 << 10; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = 65536; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: *value = THREADS; break;
    case cudaDevAttrMaxBlockDimZ: *value = 64; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *, size_t *);
API cudaError_t cudaGetDeviceProperties(cudaDeviceProp *found, int) {
    size_t free_bytes;
    memset(found, 0, sizeof *found);
    strcpy(found->name, "CUDA machine");
    cudaMemGetInfo(&free_bytes, &found->totalGlobalMem);
    found->major = 9;
    found->multiProcessorCount = PROCESSORS;
    found->warpSize = WARP;
    found->maxThreadsPerBlock = THREADS;
    found->sharedMemPerBlock = SHARED;
    return cudaSuccess;
}

API cudaError_t cudaDeviceSynchronize() {
    count("synchronize device");
    wait_for_all();
    return cudaSuccess;
}

// Streams.

static cudaError_t new_stream(cudaStream_t *made, unsigned flags) {
    *made = reinterpret_cast<cudaStream_t>(make_stream(flags));
    return cudaSuccess;
}
API cudaError_t cudaStreamCreate(cudaStream_t *made) { return new_stream(made, 0); }
API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags) {
    return new_stream(made, flags);
}
API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int) {
    return new_stream(made, flags);
}
API cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned *flags) {
    return *flags = stream_of(stream)->flags, cudaSuccess;
}
API cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
API cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    destroy_stream(stream_of(stream));
    return cudaSuccess;
}
API cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    count("synchronize stream");
    wait_for(submit(stream, {}));  // the default stream waits for all blocking ones
    return cudaSuccess;
}
API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return advance(stream_of(stream)->last) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned) {
    Hold hold(lock);
    auto awaited = reinterpret_cast<Event *>(handle)->operation;
    if (awaited && !awaited->done) submit(stream, {})->after.push_back(awaited);
    return cudaSuccess;
}
API cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
API cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data) {
    submit(stream, [=] { function(data); });
    return cudaSuccess;
}

// Events.

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags) {
    *made = reinterpret_cast<cudaEvent_t>(new Event{nullptr, !(flags & cudaEventDisableTiming)});
    return cudaSuccess;
}
API cudaError_t cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
API cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete reinterpret_cast<Event *>(event);
    return cudaSuccess;
}
API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    count("record event");
    reinterpret_cast<Event *>(event)->operation = submit(stream, {});
    return cudaSuccess;
}
API cudaError_t cudaEventQuery(cudaEvent_t event) {
    return advance(reinterpret_cast<Event *>(event)->operation) ? cudaSuccess : cudaErrorNotReady;
}
API cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    count("synchronize event");
    wait_for(reinterpret_cast<Event *>(event)->operation);
    return cudaSuccess;
}
API cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t from, cudaEvent_t to) {
    auto *begin = reinterpret_cast<Event *>(from), *end = reinterpret_cast<Event *>(to);
    for (Event *one : {begin, end})
        if (!one->timed || !one->operation) return fail(cudaErrorInvalidResourceHandle);
    if (!begin->operation->done || !end->operation->done) return fail(cudaErrorNotReady);
    auto passed = end->operation->ended - begin->operation->ended;
    *ms = std::chrono::duration<float, std::milli>(passed).count();
    return cudaSuccess;
}
