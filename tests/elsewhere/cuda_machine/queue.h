// The queue that stands for a GPU: an operation runs only when somebody must see its result.
//
// That is the latest moment that CUDA allows, so a host that reads too early, an event that nobody
// waits for and a block that is given back too early all show. CUDA_MACHINE_EAGER=1 runs everything
// at once; CUDA_MACHINE_NULL=1 runs nothing, so that what Python needs alone can be timed.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace machine {

struct Operation {
    std::vector<std::shared_ptr<Operation>> after;
    std::function<void()> run;
    bool done = false;
    std::chrono::steady_clock::time_point ended;
};
using Ref = std::shared_ptr<Operation>;

struct Stream {
    Ref last;              // the newest operation
    bool blocking = true;  // waits for the legacy default stream, and that for this one
    unsigned flags = 0;
};

struct Event {
    Ref operation;
    bool timed = true;
};

extern std::recursive_mutex lock;

bool is_set(const char *variable);  // to anything but nothing and 0
bool is_null();

Stream *stream_of(void *handle);  // null, 1 and 2 are the legacy default stream
Stream *make_stream(unsigned flags);
void destroy_stream(Stream *stream);

Ref submit(void *stream, std::function<void()> run);
void wait_for(const Ref &operation);
bool advance(const Ref &operation);  // runs at most one operation; whether this one is done
void wait_for_all();

// Counts a call. CUDA_MACHINE_COUNT names the file to which the counts are added at the end, and
// cuda_machine_count(name) tells one of them at any time.
void count(const std::string &name);

// While one of these lives, host code may touch device memory; see memory.cpp.
struct Opened {
    Opened();
    ~Opened();
};

}  // namespace machine
