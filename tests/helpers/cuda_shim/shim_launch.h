// Starting the threads of a grid, as fibers; included by shim.h alone.
#pragma once

namespace shim {

using Body = std::function<void()>;


inline jmp_buf home;
inline const Body *running_body;
inline int direction;

inline void fail(const char *message) {
    snprintf(error, sizeof error, "%s (block %u,%u,%u thread %u,%u,%u)", message, block->index.x,
             block->index.y, block->index.z, current->index.x, current->index.y,
             current->index.z);
    _longjmp(home, 1);
}

// The number of the first thread that can run, counted in the direction; -1 if none can.
inline int first_ready() {
    const std::vector<uint64_t> &ready = block->ready;
    int words = int(ready.size());
    for (int n = 0; n < words; ++n) {
        int i = direction > 0 ? n : words - 1 - n;
        if (ready[i])
            return 64 * i + (direction > 0 ? std::countr_zero(ready[i])
                                           : 63 - std::countl_zero(ready[i]));
    }
    return -1;
}

// Goes on with the first thread that can run; never returns to the caller. That is the least fair
// choice: a warp runs ahead of the others as far as barriers let it.
inline void next() {
    int number = first_ready();
    if (number < 0) {
        if (block->done == block->threads.size()) _longjmp(home, 2);
        fail("a barrier that not all threads reach");
    }
    current = &block->threads[number];
    if (current->started) _longjmp(current->state, 1);
    current->started = true;
    setcontext(&current->first);
}

inline int number_of_current() { return int(current - block->threads.data()); }

inline void fiber() {
    (*running_body)();
    ++block->done;
    block->clear_ready(number_of_current());
    next();
}

inline void Barrier::wait() {
    if (int(waiting.size()) + 1 == expected) {
        for (int number : waiting) block->set_ready(number);
        waiting.clear();
        return;
    }
    waiting.push_back(number_of_current());
    block->clear_ready(number_of_current());
    if (_setjmp(current->state) == 0) next();
}

// Fills this library's thread-local memory, which holds the __shared__ arrays and nothing else.
inline void poison() {
    [[maybe_unused]] static thread_local volatile char touched;
    touched = 1;  // the loader gives it memory at the first use
    dl_iterate_phdr([](dl_phdr_info *info, size_t, void *) {
        bool own = false;
        const ElfW(Phdr) *found = nullptr;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
            const ElfW(Phdr) &part = info->dlpi_phdr[i];
            auto start = info->dlpi_addr + part.p_vaddr, here = reinterpret_cast<ElfW(Addr)>(&home);
            if (part.p_type == PT_LOAD) own |= start <= here && here < start + part.p_memsz;
            if (part.p_type == PT_TLS) found = &part;
        }
        if (own && found) memset(info->dlpi_tls_data, POISON, found->p_memsz);
        return int(own);
    }, nullptr);
}

inline void run_block(const Body &body, int order) {
    static std::vector<std::unique_ptr<char[]>> stacks;
    running_body = &body;
    direction = order;
    poison();
    while (stacks.size() < block->threads.size())
        stacks.emplace_back(new char[STACK]);
    for (size_t i = 0; i < block->threads.size(); ++i) {
        ucontext_t &context = block->threads[i].first;
        getcontext(&context);
        context.uc_stack.ss_sp = stacks[i].get();
        context.uc_stack.ss_size = STACK;
        context.uc_link = nullptr;
        makecontext(&context, fiber, 0);
    }
    if (_setjmp(home) == 0) next();
}


// Runs all blocks one after another; returns an empty text, or what went wrong.
inline const char *run_grid(dim3 grid, dim3 threads, size_t shared_bytes, int order,
                            const Body &body) {
    error[0] = 0;
    grid_size = grid;
    block_size = threads;
    unsigned count = grid.x * grid.y * grid.z;
    for (unsigned n = 0; n < count && !error[0]; ++n) {
        unsigned i = order > 0 ? n : count - 1 - n;
        Block now({i % grid.x, i / grid.x % grid.y, i / (grid.x * grid.y)}, threads, shared_bytes);
        block = &now;
        run_block(body, order);
    }
    return error;
}

template <typename... P, size_t... I>
const char *call(void (*kernel)(P...), const unsigned *shape, size_t shared_bytes, int order,
                 void **args, const size_t *sizes, size_t given, std::index_sequence<I...>) {
    constexpr size_t expected[] = {sizeof(P)..., 0};
    if (given != sizeof...(P)) return "wrong number of arguments";
    for (size_t i = 0; i < given; ++i)
        if (sizes[i] != expected[i]) return "an argument of another size than the parameter";
    return run_grid({shape[0], shape[1], shape[2]}, {shape[3], shape[4], shape[5]}, shared_bytes,
                    order, [&] { kernel(*static_cast<P *>(args[I])...); });
}

// One kernel as a plain function: shape = grid and block, args = a pointer to each argument.
template <auto Kernel> struct Launch;
template <typename... P, void (*Kernel)(P...)> struct Launch<Kernel> {
    static const char *run(const unsigned *shape, size_t shared_bytes, int order, void **args,
                           const size_t *sizes, size_t given) {
        return call(Kernel, shape, shared_bytes, order, args, sizes, given,
                    std::index_sequence_for<P...>());
    }
};

struct Entry {
    const char *name;
    const char *(*run)(const unsigned *, size_t, int, void **, const size_t *, size_t);
};

}  // namespace shim
