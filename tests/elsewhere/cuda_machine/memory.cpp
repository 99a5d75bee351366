// Memory of libcudart.so.13: device memory is host memory that the host may not touch.
//
// Behind each allocation lies a page that nobody may touch. Fresh memory is 0xFF, a NaN in each
// type. Device memory is closed (PROT_NONE) but while an operation of the queue runs: the host, and
// an MPI library that is given a device pointer, end with a message. CUDA_MACHINE_AWARE=1 leaves it
// open, as for an MPI library that understands device pointers.
#include <cuda_runtime_api.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <map>

#include "queue.h"

using namespace machine;
using Hold = std::lock_guard<std::recursive_mutex>;
using Ranges = std::map<uintptr_t, size_t>;  // start -> bytes

static constexpr size_t PAGE = 4096;
static constexpr int POISON = 0xFF;

static Ranges on_device, pinned;
static size_t used = 0;
static int open_count = 0;
thread_local cudaError_t last_error = cudaSuccess;

cudaError_t fail(cudaError_t error) { return last_error = error; }

static size_t total() {
    const char *gib = getenv("CUDA_MACHINE_GIB");
    return size_t(gib && *gib ? atoi(gib) : 4) << 30;
}

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

static bool lies_in(const Ranges &all, const void *pointer) {
    auto at = reinterpret_cast<uintptr_t>(pointer);
    auto next = all.upper_bound(at);
    if (next == all.begin()) return false;
    auto [start, bytes] = *--next;
    return at < start + std::max<size_t>(bytes, 1);
}

// Who may touch device memory, and when.

static bool is_aware() {
    static bool aware = is_set("CUDA_MACHINE_AWARE");
    return aware;
}

static void protect(int how) {
    if (is_aware()) return;
    for (auto [start, bytes] : on_device) mprotect(reinterpret_cast<void *>(start), pages(bytes), how);
}

Opened::Opened() {
    Hold hold(lock);
    if (open_count++ == 0) protect(PROT_READ | PROT_WRITE);
}

Opened::~Opened() {
    Hold hold(lock);
    if (--open_count == 0) protect(PROT_NONE);
}

API void cuda_machine_open() { new Opened; }
API void cuda_machine_close() {
    Hold hold(lock);
    if (--open_count == 0) protect(PROT_NONE);
}

static void say_what_failed(int number, siginfo_t *info, void *) {
    auto at = reinterpret_cast<uintptr_t>(info->si_addr);
    auto next = on_device.upper_bound(at);  // also for the page behind an allocation
    const char *text = "";
    if (number == SIGILL) text = "cuda machine: a kernel's load or store is off its alignment\n";
    else if (next != on_device.begin()) {
        auto [start, bytes] = *--next;
        if (at < start + pages(bytes)) text = "cuda machine: the host touched device memory\n";
        else if (at < start + pages(bytes) + PAGE)
            text = "cuda machine: something touched what lies behind a piece of device memory\n";
    }
    if (write(2, text, strlen(text)) < 0) _exit(139);
    signal(number, SIG_DFL);  // the instruction runs again, and ends the process
}

static struct AtTheStart {
    AtTheStart() {
        struct sigaction action = {};
        action.sa_sigaction = say_what_failed;
        action.sa_flags = SA_SIGINFO;
        for (int number : {SIGSEGV, SIGILL}) sigaction(number, &action, nullptr);
    }
} at_the_start;

// Allocations.

API cudaError_t cudaMalloc(void **pointer, size_t bytes) {
    count("cudaMalloc");
    Hold hold(lock);
    if (used + bytes > total()) return fail(cudaErrorMemoryAllocation);
    void *at = mmap(nullptr, pages(bytes) + PAGE, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
    memset(at, POISON, bytes);
    mprotect(static_cast<char *>(at) + pages(bytes), PAGE, PROT_NONE);
    if (!is_aware() && !open_count) mprotect(at, pages(bytes), PROT_NONE);
    used += bytes;
    on_device[reinterpret_cast<uintptr_t>(at)] = bytes;
    *pointer = at;
    return cudaSuccess;
}

API cudaError_t cudaFree(void *pointer) {
    if (!pointer) return cudaSuccess;
    wait_for_all();  // as CUDA does
    Hold hold(lock);
    auto found = on_device.find(reinterpret_cast<uintptr_t>(pointer));
    if (found == on_device.end()) return fail(cudaErrorInvalidValue);
    used -= found->second;
    munmap(pointer, pages(found->second) + PAGE);
    on_device.erase(found);
    return cudaSuccess;
}

API cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
    *all_bytes = total();
    *free_bytes = total() - used;
    return cudaSuccess;
}

API cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned) {
    count("cudaHostAlloc");
    if (posix_memalign(pointer, PAGE, std::max<size_t>(bytes, 1)))
        return fail(cudaErrorMemoryAllocation);
    memset(*pointer, POISON, bytes);
    Hold hold(lock);
    pinned[reinterpret_cast<uintptr_t>(*pointer)] = bytes;
    return cudaSuccess;
}

API cudaError_t cudaFreeHost(void *pointer) {
    wait_for_all();
    Hold hold(lock);
    if (pointer && !pinned.erase(reinterpret_cast<uintptr_t>(pointer)))
        return fail(cudaErrorInvalidValue);
    free(pointer);
    return cudaSuccess;
}

API cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *found, const void *pointer) {
    Hold hold(lock);
    bool device = lies_in(on_device, pointer);
    memset(found, 0, sizeof *found);
    found->type = device                     ? cudaMemoryTypeDevice
                  : lies_in(pinned, pointer) ? cudaMemoryTypeHost
                                             : cudaMemoryTypeUnregistered;
    (device ? found->devicePointer : found->hostPointer) = const_cast<void *>(pointer);
    return cudaSuccess;
}

// Copies.

static bool is_right(const void *to, const void *from, cudaMemcpyKind kind) {
    Hold hold(lock);
    bool to_device = lies_in(on_device, to), from_device = lies_in(on_device, from);
    switch (kind) {
    case cudaMemcpyHostToDevice: return to_device && !from_device;
    case cudaMemcpyDeviceToHost: return !to_device && from_device;
    case cudaMemcpyDeviceToDevice: return to_device && from_device;
    default: return true;
    }
}

static const char *name_of(cudaMemcpyKind kind) {
    return kind == cudaMemcpyHostToDevice   ? "copy to the device"
           : kind == cudaMemcpyDeviceToHost ? "copy to the host"
                                            : "copy on the device";
}

API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                                cudaStream_t stream) {
    count(name_of(kind));
    if (bytes && !is_right(to, from, kind)) return fail(cudaErrorInvalidValue);
    Hold hold(lock);
    // Where nothing runs, the host gets zeros rather than what its memory held.
    if (is_null() && kind == cudaMemcpyDeviceToHost) memset(to, 0, bytes);
    if (kind == cudaMemcpyHostToDevice && !lies_in(pinned, from)) {
        // pageable memory has been read when the call returns
        auto begin = static_cast<const char *>(from);
        auto copied = std::make_shared<std::vector<char>>(begin, begin + bytes);
        submit(stream, [=] { memcpy(to, copied->data(), bytes); });
        return cudaSuccess;
    }
    auto copy = submit(stream, [=] { memmove(to, from, bytes); });
    if (kind == cudaMemcpyDeviceToHost && !lies_in(pinned, to)) wait_for(copy);
    return cudaSuccess;
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    count(name_of(kind));
    if (bytes && !is_right(to, from, kind)) return fail(cudaErrorInvalidValue);
    auto copy = submit(nullptr, [=] { memmove(to, from, bytes); });
    if (kind != cudaMemcpyDeviceToDevice) wait_for(copy);
    return cudaSuccess;
}

API cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
    count("memset");
    submit(stream, [=] { memset(to, value, bytes); });
    return cudaSuccess;
}

API cudaError_t cudaMemset(void *to, int value, size_t bytes) {
    return cudaMemsetAsync(to, value, bytes, nullptr);
}
