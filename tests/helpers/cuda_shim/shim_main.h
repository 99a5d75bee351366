// The doors of a compiled kernel file: `launch` for a library, `main` for a program that gets name,
// shape and arguments on its standard input. Included after the table `entries`.
#pragma once

extern "C" __attribute__((visibility("default"))) const char *
launch(const char *name, const unsigned *shape, size_t shared_bytes, int order, void **args,
       const size_t *sizes, size_t given) {
    for (const shim::Entry &one : entries)
        if (strcmp(one.name, name) == 0)
            return one.run(shape, shared_bytes, order, args, sizes, given);
    return "no such kernel";
}

#ifdef SHIM_THREADS
int main() {
    char name[300];
    unsigned shape[6];
    size_t shared_bytes, given;
    bool ok = scanf("%299[^\n]", name) == 1;
    for (unsigned &one : shape) ok = ok && scanf("%u", &one) == 1;
    ok = ok && scanf("%zu %zu", &shared_bytes, &given) == 2;
    // Each array in memory of exactly its size: one step too far is seen.
    std::vector<std::unique_ptr<char[]>> memory;
    std::vector<void *> pointers(given), args(given);
    std::vector<size_t> sizes(given);
    for (size_t i = 0; ok && i < given; ++i) {
        int is_array;
        size_t bytes;
        ok = scanf("%d %zu%*c", &is_array, &bytes) == 2;
        memory.emplace_back(new char[bytes]);
        ok = ok && fread(memory.back().get(), 1, bytes, stdin) == bytes;
        pointers[i] = memory.back().get();
        args[i] = is_array ? &pointers[i] : pointers[i];
        sizes[i] = is_array ? sizeof(void *) : bytes;
    }
    const char *message = ok ? launch(name, shape, shared_bytes, 1, args.data(), sizes.data(),
                                      given) : "the input cannot be read";
    if (*message) fprintf(stderr, "shim: %s\n", message);
    return *message ? 3 : 0;
}
#endif
