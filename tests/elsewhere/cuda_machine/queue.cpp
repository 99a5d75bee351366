#include "queue.h"

#include <map>
#include <set>

namespace machine {

std::recursive_mutex lock;
using Hold = std::lock_guard<std::recursive_mutex>;

bool is_set(const char *variable) {
    const char *value = getenv(variable);
    return value && *value && strcmp(value, "0");
}

bool is_null() {
    static bool null = is_set("CUDA_MACHINE_NULL");
    return null;
}

// Streams.

static Stream *default_stream() {
    static Stream *only = new Stream;
    return only;
}

static std::set<Stream *> &all_streams() {
    static auto *all = new std::set<Stream *>{default_stream()};
    return *all;
}

Stream *stream_of(void *handle) {
    return reinterpret_cast<uintptr_t>(handle) <= 2 ? default_stream()
                                                    : static_cast<Stream *>(handle);
}

Stream *make_stream(unsigned flags) {
    constexpr unsigned NON_BLOCKING = 1;
    Hold hold(lock);
    auto *made = new Stream{nullptr, !(flags & NON_BLOCKING), flags};
    all_streams().insert(made);
    return made;
}

void destroy_stream(Stream *stream) {
    Hold hold(lock);
    wait_for(stream->last);
    all_streams().erase(stream);
    delete stream;
}

// Operations.

Ref submit(void *handle, std::function<void()> run) {
    static bool eager = is_set("CUDA_MACHINE_EAGER");
    auto made = std::make_shared<Operation>();
    if (is_null()) {
        made->done = true;
        made->ended = std::chrono::steady_clock::now();
        return made;
    }
    Hold hold(lock);
    Stream *stream = stream_of(handle), *legacy = default_stream();
    made->run = std::move(run);
    auto follow = [&](const Ref &other) {
        if (other && !other->done) made->after.push_back(other);
    };
    follow(stream->last);
    if (stream == legacy) {
        for (Stream *other : all_streams())
            if (other != stream && other->blocking) follow(other->last);
    } else if (stream->blocking)
        follow(legacy->last);
    stream->last = made;
    if (eager) wait_for(made);
    return made;
}

static void execute(Operation &now) {
    Opened opened;
    now.done = true;
    auto run = std::move(now.run);
    now.run = nullptr;
    if (run) run();
    now.ended = std::chrono::steady_clock::now();
    now.after.clear();
}

// The first operation that `now` waits for, or null.
static Operation *waited_for(const Operation &now) {
    for (auto &one : now.after)
        if (!one->done) return one.get();
    return nullptr;
}

void wait_for(const Ref &operation) {
    Hold hold(lock);
    if (!operation || operation->done) return;
    Opened opened;  // once for the whole chain
    std::vector<Operation *> stack{operation.get()};  // no recursion: chains are long
    while (!stack.empty()) {
        Operation *now = stack.back();
        if (Operation *first = now->done ? nullptr : waited_for(*now)) {
            stack.push_back(first);
            continue;
        }
        stack.pop_back();
        if (!now->done) execute(*now);
    }
}

bool advance(const Ref &operation) {
    Hold hold(lock);
    if (!operation || operation->done) return true;
    Operation *now = operation.get();
    while (Operation *first = waited_for(*now)) now = first;
    execute(*now);
    return operation->done;
}

void wait_for_all() {
    Hold hold(lock);
    for (Stream *stream : std::vector<Stream *>(all_streams().begin(), all_streams().end()))
        wait_for(stream->last);
}

// Counts.

static std::map<std::string, long> &counts() {
    static auto *all = new std::map<std::string, long>;
    return *all;
}

void count(const std::string &name) {
    Hold hold(lock);
    ++counts()[name];
}

API long cuda_machine_count(const char *name) {
    Hold hold(lock);
    return counts()[name];
}

static struct AtTheEnd {
    ~AtTheEnd() {
        const char *path = getenv("CUDA_MACHINE_COUNT");
        FILE *file = path && *path ? fopen(path, "a") : nullptr;
        if (!file) return;
        for (auto &[name, times] : counts()) fprintf(file, "%ld %s\n", times, name.c_str());
        fclose(file);
    }
} at_the_end;

}  // namespace machine
