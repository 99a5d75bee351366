// CuPy's own headers, which each of its sources includes; compiled in advance.
#pragma once

#include "device.h"

#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#include <cupy/atomics.cuh>
#include <cupy/math_constants.h>
