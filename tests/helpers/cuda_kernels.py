"""The CUDA kernel instantiations in use: those that tests compile, and run on the CPU."""

from bench.kernels import rungs
from mpipar.ops import cupy_ops
from mpipar.ops.cuda import attention, fused, kernels
from mpipar.ops.cuda import gemm as own

NORM_KERNELS = (
    "layernorm_forward rmsnorm_forward layernorm_backward rmsnorm_backward "
    "layernorm_slabs rmsnorm_slabs"
)
DTYPES = ("float32", "bfloat16", "float16")


def source(file):
    """The text of a kernel of mpipar, or of a rung of the ladder."""
    return kernels.source(file, rungs.FOLDERS)


def of_products():
    """Return file -> name expressions of what `--gemm tile` and the benchmark run."""
    chosen = [rungs.gemm(rung, "NN") for rung in rungs.RUNGS if rung != "mma"]
    for dtype in ("bfloat16", "float16"):
        # Weight gradients are float32, and so is the array they are added to.
        types = {"NN": dtype, "NT": dtype, "TN": "float32"}
        chosen += [own.gemm(layout, dtype, types[layout]) for layout in own.LAYOUTS]
    files = {}
    for kernel in chosen:
        files.setdefault(kernel.file, []).append(kernel.name)
    return {file: tuple(names) for file, names in files.items()}


def of_chains():
    """Return file -> name expressions of what `FusedOps` runs."""
    each = {
        "gelu.cu": (fused.by_type, "gelu_forward gelu_backward"),
        "swiglu.cu": (fused.by_type, "swiglu_forward swiglu_backward"),
        "rope.cu": (fused.by_type, "rotate"),
        "norm.cu": (fused.by_type, NORM_KERNELS),
        "cross_entropy.cu": (fused.by_row, "cross_entropy_stats cross_entropy_backward"),
    }
    files = {
        file: tuple(name(kernel, dtype) for kernel in names.split() for dtype in DTYPES)
        for file, (name, names) in each.items()
    }
    files["columns.cu"] = tuple(
        f"column_sums<{kernels.C_TYPES[dtype]}, {kernels.C_TYPES[out]}>"
        for dtype in DTYPES
        for out in dict.fromkeys(("float32", dtype))
    )
    files["cross_entropy.cu"] += ("cross_entropy_combine",)
    files["adamw.cu"] = (
        "adamw",
        *(fused.by_type("adamw_with_copy", dtype) for dtype in DTYPES[1:]),
    )
    files["embedding.cu"] = (
        cupy_ops.SORT,
        cupy_ops.MERGE,
        *(name for names in cupy_ops.EMBEDDINGS.values() for name in names),
    )
    return files


def of_attention():
    """Return file -> name expressions of what `AttentionOps` runs."""
    pairs = {(y_dtype, dtype) for dtype in DTYPES for y_dtype in ("float32", dtype)}
    files = {"flash_backward.cu": tuple(attention.delta_name(*pair) for pair in sorted(pairs))}
    for kernel in attention.TILES[4]:
        tiles = [
            attention.tile(kernel, dtype, width) for dtype in DTYPES for width in attention.WIDTHS
        ]
        if kernel == "flash_backward":
            tiles += [attention.of_parts(one) for one in tiles]
        file = f"{kernel}.cu"
        files[file] = files.get(file, ()) + tuple(one.name for one in tiles)
    return files


# File -> the instantiations of its kernels that are used, as name expressions.
KERNELS = {**of_products(), **of_chains(), **of_attention()}
# File -> most registers per thread that its kernels may use; 128 by default. Attention keeps a
# head's width of sums in registers, so it may use all that there are.
REGISTERS = {
    "gemm_naive.cu": 40,
    "gemm_shared.cu": 40,
    "gemm_register.cu": 96,
    "flash_forward.cu": 255,
    "flash_backward.cu": 255,
}
