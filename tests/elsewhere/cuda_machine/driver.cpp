// libcuda.so.1: a module is a shared library that nvrtc.cpp made, a kernel a function in it.
#ifdef __SSE__
#include <xmmintrin.h>
#endif

#include <cuda.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include "image.h"
#include "queue.h"

using namespace machine;

static constexpr int SHARED = 48 << 10, MOST_SHARED = 227 << 10, THREADS = 1024, MOST_GRID_Y = 65535;

struct Kernel {
    const machine_kernel *entry;  // null where nothing runs
    std::string name;
    int most_shared = SHARED;
};

// Errors, devices and contexts: there is one of each.

API CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
API CUresult cuGetErrorName(CUresult error, const char **name) {
    static thread_local char text[40];
    snprintf(text, sizeof text, "CUDA_ERROR_%d", error);
    *name = text;
    return CUDA_SUCCESS;
}
API CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }
API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
API CUresult cuCtxGetCurrent(CUcontext *context) {
    static char only;
    return *context = reinterpret_cast<CUcontext>(&only), CUDA_SUCCESS;
}
API CUresult cuCtxSetCurrent(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxCreate_v2(CUcontext *context, unsigned, CUdevice) { return cuCtxGetCurrent(context); }
API CUresult cuCtxDestroy_v2(CUcontext) { return CUDA_SUCCESS; }
API CUresult cuCtxGetDevice(CUdevice *device) { return *device = 0, CUDA_SUCCESS; }
API CUresult cuStreamGetCtx(CUstream, CUcontext *context) { return cuCtxGetCurrent(context); }

// Modules.

API CUresult cuModuleLoadData(CUmodule *module, const void *image) {
    count("load module");
    auto *header = static_cast<const ImageHeader *>(image);
    if (memcmp(header->magic, IMAGE_MAGIC, sizeof header->magic)) return CUDA_ERROR_INVALID_IMAGE;
    if (!header->bytes) return *module = nullptr, CUDA_SUCCESS;  // compiled under CUDA_MACHINE_NULL
    int file = memfd_create("kernel", MFD_CLOEXEC);
    if (write(file, header + 1, header->bytes) != ssize_t(header->bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    std::string path = "/proc/self/fd/" + std::to_string(file);
    void *library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "cuda machine: %s\n", dlerror());
        return CUDA_ERROR_INVALID_IMAGE;
    }
    *module = static_cast<CUmodule>(library);  // the file stays open: its name must stay unique
    return CUDA_SUCCESS;
}
API CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    const machine_kernel *entry = nullptr;
    if (module) {
        auto list = reinterpret_cast<const machine_kernel *(*)()>(dlsym(module, KERNELS_FUNCTION));
        for (entry = list(); entry->name && strcmp(entry->name, name);) ++entry;
        if (!entry->name) return CUDA_ERROR_NOT_FOUND;
    }
    *function = reinterpret_cast<CUfunction>(new Kernel{entry, name});
    return CUDA_SUCCESS;
}

API CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module,
                                  const char *name) {
    *pointer = reinterpret_cast<CUdeviceptr>(dlsym(module, name));
    if (bytes) *bytes = 0;
    return *pointer ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

// Kernels.

// CuPy compiles with -ftz=true: numbers of float32 below 1.2e-38 become 0. Here those of float64 that
// are below 2.2e-308 do, too.
struct Flushing {
#ifdef __SSE__
    unsigned before = _mm_getcsr();
    Flushing() { _mm_setcsr(before | 0x8040); }
    ~Flushing() { _mm_setcsr(before); }
#endif
};

API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                            CUstream stream, void **arguments, void **extra) {
    auto *kernel = reinterpret_cast<Kernel *>(function);
    count("launch");
    count("launch " + kernel->name);
    unsigned long threads = 1ul * block_x * block_y * block_z;
    if (!grid_x || !grid_y || !grid_z || !threads || threads > THREADS || grid_y > MOST_GRID_Y ||
        grid_z > MOST_GRID_Y || int(shared) > kernel->most_shared)
        return CUDA_ERROR_INVALID_VALUE;
    auto *entry = kernel->entry;
    if (!entry) return CUDA_SUCCESS;
    if (extra || (!arguments && entry->count)) return CUDA_ERROR_INVALID_VALUE;
    std::vector<std::vector<char>> values;  // the caller's may be gone when the kernel runs
    for (size_t i = 0; i < entry->count; ++i) {
        auto from = static_cast<const char *>(arguments[i]);
        values.emplace_back(from, from + entry->sizes[i]);
    }
    submit(stream, [=, name = kernel->name]() mutable {
        std::vector<void *> pointers;
        for (auto &one : values) pointers.push_back(one.data());
        unsigned shape[] = {grid_x, grid_y, grid_z, block_x, block_y, block_z};
        Flushing flushing;
        const char *error = entry->run(shape, shared, 1, pointers.data(), entry->sizes, entry->count);
        if (!*error) return;
        fprintf(stderr, "cuda machine: kernel %s: %s\n", name.c_str(), error);
        abort();
    });
    return CUDA_SUCCESS;
}

API CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
    *value = which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? THREADS
             : which == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                 ? reinterpret_cast<Kernel *>(function)->most_shared
                 : 0;
    return CUDA_SUCCESS;
}

API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_SUCCESS;
    if (value > MOST_SHARED) return CUDA_ERROR_INVALID_VALUE;
    reinterpret_cast<Kernel *>(function)->most_shared = value;
    return CUDA_SUCCESS;
}

API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction, int, size_t) {
    return *blocks = 2, CUDA_SUCCESS;
}
API CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction, CUoccupancyB2DSize,
                                              size_t, int) {
    *grid = 8;
    *block = 128;
    return CUDA_SUCCESS;
}
API CUresult cuLinkDestroy(CUlinkState) { return CUDA_SUCCESS; }
