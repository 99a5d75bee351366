// The door of a compiled kernel file. Included after the table `entries`.
#pragma once

extern "C" __attribute__((visibility("default"))) const char *
launch(const char *name, const unsigned *shape, size_t shared_bytes, int order, void **args,
       const size_t *sizes, size_t given) {
    for (const shim::Entry &one : entries)
        if (strcmp(one.name, name) == 0)
            return one.run(shape, shared_bytes, order, args, sizes, given);
    return "no such kernel";
}

