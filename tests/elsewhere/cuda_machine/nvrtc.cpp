// libnvrtc.so.13: g++ compiles a CUDA source for the CPU.
//
// A source without barriers, votes, shuffles and shared memory runs as plain loops over its threads;
// any other as the fibers of tests/helpers/cuda_shim. CuPy keeps what it gets in its own cache on disk.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <fstream>
#include <regex>
#include <sstream>

#include "image.h"
#include "queue.h"

// As in nvrtc.h, whose package would bring NVIDIA's compiler along.
using nvrtcProgram = struct _nvrtcProgram *;
enum nvrtcResult {
    NVRTC_SUCCESS = 0,
    NVRTC_ERROR_INVALID_INPUT = 3,
    NVRTC_ERROR_COMPILATION = 6,
    NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID = 10,
};

using Texts = std::vector<std::string>;

struct Program {
    std::string source, log, image;
    Texts names;
};
static Program *of(nvrtcProgram program) { return reinterpret_cast<Program *>(program); }

static bool has(const std::string &text, const char *part) { return text.find(part) != text.npos; }

static std::string read(const std::string &path) {
    std::stringstream all;
    all << std::ifstream(path, std::ios::binary).rdbuf();
    return all.str();
}

// The source with tests/helpers/cuda_shim's mma.cuh in place of mpipar's, which is PTX. mpipar puts its
// headers into the source behind marks (#line 1 "FILE"), and common.cuh before all others.
static std::string without_ptx(const std::string &source) {
    static const std::regex part(R"(\n#line 1 "[^"]*/mma\.cuh"\n[^]*?(?=\n#line ))");
    std::smatch found;
    if (!std::regex_search(source, found, part)) return source;
    static const std::regex include("#include \"common.cuh\"");
    std::string own = read(std::string(getenv("CUDA_MACHINE_DEVICE")) + "/mma.cuh");
    return found.prefix().str() + "\n" + std::regex_replace(own, include, "") +
           found.suffix().str();
}

// The kernels of a source that names none: those that C code could call.
static Texts kernels_in(const std::string &source) {
    static const std::regex entry(
        R"(__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\()");
    Texts names;
    if (has(source, "extern \"C\""))
        for (std::sregex_iterator one(source.begin(), source.end(), entry), end; one != end; ++one)
            names.push_back((*one)[1]);
    return names;
}

static bool has_threads_that_meet(const std::string &source) {
    for (const char *word : {"__sync", "_sync(", "__shared__", "mma.cuh"})
        if (has(source, word)) return true;
    return false;
}

// Options that this compiler understands: macros, and folders that are not CUDA's own.
static std::string taken_over(const Texts &options) {
    std::string taken;
    for (auto &one : options)
        if (!one.rfind("-D", 0) || (!one.rfind("-I", 0) && !has(one, "cccl") && !has(one, "nvidia/")))
            taken += " '" + one + "'";
    return taken;
}

// A file that one process holds at a time.
struct Lock {
    int file;
    explicit Lock(const std::string &path) : file(open(path.c_str(), O_CREAT | O_RDWR, 0600)) {
        flock(file, LOCK_EX);
    }
    ~Lock() { close(file); }
};

// Compiles into the program's image; returns whether that went well.
//
// All ranks ask for the same kernels at the same time: the first compiles, the others read.
static bool compile(Program &program, const Texts &options) {
    std::string device = getenv("CUDA_MACHINE_DEVICE");
    std::string source = without_ptx(program.source);
    Texts names = program.names.empty() ? kernels_in(source) : program.names;
    bool meet = has_threads_that_meet(source), of_cupy = has(source, "#include <cupy/complex.cuh>");
    for (auto &one : options) of_cupy &= one.rfind("-D", 0) != 0;  // the prelude knows no macros
    std::stringstream code;
    code << "#include \"" << (of_cupy ? "prelude.h" : "device.h") << "\"\n" << source;
    code << "\n#line 1 \"list of kernels\"\nextern \"C\" "
         << "__attribute__((visibility(\"default\"))) const machine_kernel *machine_kernels() {\n"
         << "static const machine_kernel all[] = {\n";
    for (auto &one : names) code << "machine_entry<&" << one << ">(\"" << one << "\"),\n";
    code << "{}};\nreturn all; }\n";
    std::string command = std::string(getenv("CUDA_MACHINE_COMPILER")) +
                          (meet ? "" : " -DMACHINE_LOOPS") + " -shared -I'" + device +
                          (meet ? "/fibers" : "/loops") + "' -I'" + device + "'" + taken_over(options);
    std::string path = std::string(getenv("CUPY_CACHE_DIR")) + "/" +
                       std::to_string(std::hash<std::string>()(command + "\n" + code.str()));
    Lock lock(path + ".lock");
    if (access((path + ".so").c_str(), R_OK)) {
        std::ofstream(path + ".cpp") << code.str();
        command += " '" + path + ".cpp' -o '" + path + ".new' 2> '" + path + ".log'";
        bool well = system(command.c_str()) == 0;
        program.log = read(path + ".log");
        if (!well || rename((path + ".new").c_str(), (path + ".so").c_str())) return false;
    }
    std::string library = read(path + ".so");
    ImageHeader header{{}, library.size()};
    memcpy(header.magic, IMAGE_MAGIC, sizeof header.magic);
    program.image = std::string(reinterpret_cast<char *>(&header), sizeof header) + library;
    return true;
}

API const char *nvrtcGetErrorString(nvrtcResult result) {
    return result ? "NVRTC_ERROR_COMPILATION" : "NVRTC_SUCCESS";
}
API nvrtcResult nvrtcVersion(int *major, int *minor) {
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetNumSupportedArchs(int *count) { return *count = 2, NVRTC_SUCCESS; }
API nvrtcResult nvrtcGetSupportedArchs(int *all) {
    all[0] = 80;
    all[1] = 90;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcCreateProgram(nvrtcProgram *program, const char *source, const char *,
                                   int headers, const char *const *, const char *const *) {
    if (headers) return NVRTC_ERROR_INVALID_INPUT;
    *program = reinterpret_cast<nvrtcProgram>(new Program{source});
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcDestroyProgram(nvrtcProgram *program) {
    delete of(*program);
    *program = nullptr;
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcAddNameExpression(nvrtcProgram program, const char *name) {
    of(program)->names.push_back(name);
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetLoweredName(nvrtcProgram program, const char *name, const char **lowered) {
    for (auto &one : of(program)->names)
        if (one == name) return *lowered = one.c_str(), NVRTC_SUCCESS;
    return NVRTC_ERROR_NAME_EXPRESSION_NOT_VALID;
}
API nvrtcResult nvrtcCompileProgram(nvrtcProgram handle, int count, const char *const *options) {
    machine::count("compile");
    Program &program = *of(handle);
    if (!has(program.source, "__global__")) {  // CuPy only asks what its headers are worth
        program.image = "// no kernel\n";
        return NVRTC_SUCCESS;
    }
    if (machine::is_null()) {
        ImageHeader header{{}, 0};
        memcpy(header.magic, IMAGE_MAGIC, sizeof header.magic);
        program.image.assign(reinterpret_cast<char *>(&header), sizeof header);
        return NVRTC_SUCCESS;
    }
    bool well = compile(program, Texts(options, options + count));
    return well ? NVRTC_SUCCESS : NVRTC_ERROR_COMPILATION;
}

// What a program gives: a log, and its image under both of CUDA's names.

static nvrtcResult copy(const std::string &from, size_t bytes, char *to) {
    memcpy(to, from.c_str(), bytes);
    return NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetProgramLogSize(nvrtcProgram program, size_t *bytes) {
    return *bytes = of(program)->log.size() + 1, NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetProgramLog(nvrtcProgram program, char *to) {
    return copy(of(program)->log, of(program)->log.size() + 1, to);
}
API nvrtcResult nvrtcGetPTXSize(nvrtcProgram program, size_t *bytes) {
    return *bytes = of(program)->image.size(), NVRTC_SUCCESS;
}
API nvrtcResult nvrtcGetPTX(nvrtcProgram program, char *to) {
    return copy(of(program)->image, of(program)->image.size(), to);
}
API nvrtcResult nvrtcGetCUBINSize(nvrtcProgram program, size_t *bytes) {
    return nvrtcGetPTXSize(program, bytes);
}
API nvrtcResult nvrtcGetCUBIN(nvrtcProgram program, char *to) { return nvrtcGetPTX(program, to); }
