// libcublasLt.so.13: products with the epilogues that mpipar asks for.
//
// Strict where the library leaves it to the caller: an algorithm holds only for the product, the
// matrices and the alignments that it was chosen for, and it writes all of its workspace.
#include <map>

#include "products.h"

using namespace machine;

enum { DEFAULT = 1, BIAS = 4, BGRADA = 256, BGRADB = 512 };  // cublasLtEpilogue_t
enum { TRANSA = 3, TRANSB = 4, EPILOGUE = 7, BIAS_POINTER = 8 };
enum { MAX_WORKSPACE = 1, MIN_ALIGNMENT = 5 };
constexpr size_t WORKSPACE = 512, MOST_ALIGNMENT = 256;

struct Description {
    int compute, scale;
    std::map<int, long long> set{{EPILOGUE, DEFAULT}};

    long long at(int attribute) const {
        auto found = set.find(attribute);
        return found == set.end() ? 0 : found->second;
    }
    const char *place(int attribute) const { return reinterpret_cast<const char *>(at(attribute)); }
};

struct Layout {
    int type;
    unsigned long long rows, columns;
    long long leading;

    bool operator==(const Layout &) const = default;
};

struct Preference {
    size_t workspace = 0, aligned[4] = {MOST_ALIGNMENT, MOST_ALIGNMENT, MOST_ALIGNMENT,
                                        MOST_ALIGNMENT};
};

struct Algorithm {  // 64 bytes, the caller's to keep
    int chosen = 0, compute = 0, epilogue = 0, turned = 0;
    unsigned short aligned[4] = {};
    int sizes[3] = {};
};
static_assert(sizeof(Algorithm) <= 64);

struct Found {
    union {
        Algorithm algorithm;
        unsigned long long data[8];
    };
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
};
static_assert(sizeof(Found) == 96);

template <typename T>
static const T &as(const void *x) { return *static_cast<const T *>(x); }

static long long number(const void *value, size_t size) {
    long long found = 0;
    memcpy(&found, value, std::min(size, sizeof found));
    return found;
}

API int cublasLtCreate(void **handle) { return *handle = new int, OK; }
API size_t cublasLtGetVersion() { return 130000; }

API int cublasLtMatmulDescCreate(void **made, int compute, int scale) {
    return *made = new Description{compute, scale}, OK;
}

API int cublasLtMatmulDescSetAttribute(void *product, int attribute, const void *value, size_t size) {
    if (size != (attribute == BIAS_POINTER ? 8 : 4)) return INVALID_VALUE;
    return static_cast<Description *>(product)->set[attribute] = number(value, size), OK;
}

API int cublasLtMatrixLayoutCreate(void **made, int type, unsigned long long rows,
                                   unsigned long long columns, long long leading) {
    if (leading < (long long)rows) return INVALID_VALUE;
    return *made = new Layout{type, rows, columns, leading}, OK;
}

API int cublasLtMatmulPreferenceCreate(void **made) { return *made = new Preference, OK; }

API int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                             size_t size) {
    Preference &to = *static_cast<Preference *>(preference);
    if (attribute == MAX_WORKSPACE && size == 8) return to.workspace = number(value, size), OK;
    int matrix = attribute - MIN_ALIGNMENT;
    if (matrix < 0 || matrix > 3 || size != 4) return INVALID_VALUE;
    return to.aligned[matrix] = number(value, size), OK;
}

static int problem(const Description &product, const Layout &a, const Layout &b, const Layout &c,
                   const Layout &d) {
    int epilogue = product.at(EPILOGUE);
    bool turn_a = product.at(TRANSA), turn_b = product.at(TRANSB);
    auto inner = turn_a ? a.rows : a.columns;
    if ((turn_a ? a.columns : a.rows) != d.rows || (turn_b ? b.rows : b.columns) != d.columns ||
        (turn_b ? b.columns : b.rows) != inner || !(c == d))
        return INVALID_VALUE;
    bool known = epilogue == BIAS || epilogue == BGRADA || epilogue == BGRADB;
    if (known && !product.place(BIAS_POINTER)) return INVALID_VALUE;
    bool types = a.type == b.type && (d.type == a.type || d.type == FLOAT) && a.type != DOUBLE &&
                 product.scale == FLOAT &&
                 (product.compute == COMPUTE_32F || product.compute == COMPUTE_32F_TF32);
    return known && types ? OK : NOT_SUPPORTED;
}

static Algorithm wanted(const Description &product, const Layout &a, const Layout &d) {
    Algorithm made;
    bool turned = product.at(TRANSA);
    made.chosen = 1, made.compute = product.compute, made.epilogue = product.at(EPILOGUE);
    made.turned = turned + 2 * int(product.at(TRANSB));
    made.sizes[0] = d.rows, made.sizes[1] = d.columns, made.sizes[2] = turned ? a.rows : a.columns;
    return made;
}

API int cublasLtMatmulAlgoGetHeuristic(void *, void *product, void *a, void *b, void *c, void *d,
                                       void *preference, int, void *results, int *count) {
    *count = 0;
    const Preference &limits = as<Preference>(preference);
    if (int wrong = problem(as<Description>(product), as<Layout>(a), as<Layout>(b), as<Layout>(c),
                            as<Layout>(d)))
        return wrong;
    if (limits.workspace < WORKSPACE) return NOT_SUPPORTED;
    Found found{};
    found.algorithm = wanted(as<Description>(product), as<Layout>(a), as<Layout>(d));
    for (int i = 0; i < 4; ++i) found.algorithm.aligned[i] = limits.aligned[i];
    found.workspace = WORKSPACE;
    memcpy(results, &found, sizeof found);
    return *count = 1, OK;
}

API int cublasLtMatmul(void *, void *product, const void *alpha, const void *a, void *a_layout,
                       const void *b, void *b_layout, const void *beta, const void *c,
                       void *c_layout, void *d, void *d_layout, const void *algorithm,
                       void *workspace, size_t workspace_bytes, void *stream) {
    count("product");
    const Description what = as<Description>(product);
    const Layout left = as<Layout>(a_layout), right = as<Layout>(b_layout),
                 out = as<Layout>(d_layout);
    if (int wrong = problem(what, left, right, as<Layout>(c_layout), out)) return wrong;
    Algorithm chosen = as<Algorithm>(algorithm), due = wanted(what, left, out);
    const void *places[] = {a, b, c, d};
    for (int i = 0; i < 4; ++i) {
        if (!chosen.aligned[i] || size_t(places[i]) % chosen.aligned[i]) return INVALID_VALUE;
        due.aligned[i] = chosen.aligned[i];
    }
    bool same = chosen.chosen == due.chosen && chosen.compute == due.compute &&
                chosen.epilogue == due.epilogue && chosen.turned == due.turned &&
                std::equal(chosen.sizes, chosen.sizes + 3, due.sizes);
    if (!same || !workspace || workspace_bytes < WORKSPACE) return INVALID_VALUE;
    char *bias = const_cast<char *>(what.place(BIAS_POINTER));
    double scale = load(alpha, FLOAT, 0), kept = load(beta, FLOAT, 0);
    submit(stream, [=] {
        memset(workspace, 0xFF, WORKSPACE);
        bool tf32 = left.type == FLOAT && what.compute == COMPUTE_32F_TF32;
        int m = out.rows, n = out.columns, k = due.sizes[2], type = out.type;
        Matrix A{static_cast<const char *>(a), left.type, int(left.leading), what.at(TRANSA) != 0, tf32};
        Matrix B{static_cast<const char *>(b), right.type, int(right.leading), what.at(TRANSB) != 0,
                 tf32};
        for (int i = 0; due.epilogue & (BGRADA | BGRADB) && i < (due.epilogue == BGRADA ? m : n);
             ++i) {
            float sum = 0;
            for (int l = 0; l < k; ++l) sum += due.epilogue == BGRADA ? A(i, l) : B(l, i);
            store(bias, type, i, sum);  // whatever was there
        }
        std::vector<float> sums(size_t(m) * n);
        multiply<float>(m, n, k, scale, A, B, 0, reinterpret_cast<char *>(sums.data()), FLOAT, m);
        for (int j = 0; j < n; ++j)
            for (int i = 0; i < m; ++i) {
                size_t at = size_t(j) * out.leading + i;
                double x = sums[size_t(j) * m + i];
                if (kept) x += kept * load(c, type, at);
                if (due.epilogue == BIAS) x += load(bias, type, i);
                store(d, type, at, x);
            }
    });
    return OK;
}
