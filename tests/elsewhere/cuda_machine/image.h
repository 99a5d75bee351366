// What nvrtc.cpp makes of a CUDA source and driver.cpp loads: a header, then a shared library.
#pragma once

#include <cstddef>

// A kernel of such a library; run returns an empty text, or what went wrong.
struct machine_kernel {
    const char *name;
    const char *(*run)(const unsigned *shape, size_t shared_bytes, int order, void **arguments,
                       const size_t *sizes, size_t count);
    const size_t *sizes;
    size_t count;
};

#define KERNELS_FUNCTION "machine_kernels"  // returns the kernels; the last has no name

#define IMAGE_MAGIC "MACHINE1"
struct ImageHeader {
    char magic[8];
    size_t bytes;  // of the library that follows; 0: nothing runs
};
