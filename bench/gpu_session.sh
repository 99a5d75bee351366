#!/usr/bin/env bash
# One visit to a machine with a GPU, within ten minutes and from cold caches: a step of GPT-2 124M
# alone and beside PyTorch, attention and the other kernels, the ladder of products beside cuBLAS,
# messages through pinned host memory, and the tests marked gpu. What matters most comes first.
#
#     bash bench/gpu_session.sh
#     OUT=FOLDER PYTHON=/opt/venv/bin/python3 LIMIT=300 bash bench/gpu_session.sh
#     MPICH=mpich-wheel bash bench/gpu_session.sh    # where no MPI is installed
#     REHEARSE=1 bash bench/gpu_session.sh           # small sizes: tests/cuda_machine/README.md
#
# Needs Python with CuPy, mpi4py and what mpipar imports. The script installs and downloads nothing.
# It skips parts that lack a package, an MPI or a GPU, and lists them at the end. MPICH names a
# folder with an unpacked wheel `mpich` (pip download mpich; unzip mpich-*.whl -d mpich-wheel).
# Messages need an MPI; everything else is one process and needs none.
#
# Each part has its own time limit, and its files are complete when it ends, so a visit that is cut
# short keeps what was measured. The folder OUT (gpu-session) gets session.log with everything that
# was printed, summary.txt with a line for each finished part, and one JSON file for each table.
#
# Exit code: 0 if no part failed that ran, 1 if one did, 2 if nothing can be started.
set -u

out=${OUT:-gpu-session}
limit=${LIMIT:-580} # seconds in all
python=$(command -v "${PYTHON:-python3}") || {
    echo "gpu_session.sh: no ${PYTHON:-python3}; name one with PYTHON=FILE" >&2
    exit 2
}
mkdir -p "$out" && out=$(cd "$out" && pwd) && [[ -w $out && -z $(ls -A "$out") ]] || {
    echo "gpu_session.sh: $out can't be written or is not empty; name another with OUT=FOLDER" >&2
    exit 2
}
python=$(realpath -s "$python") # do not resolve links: a virtual environment's python is one
mpiexec=$(dirname "$python")/mpiexec
[[ -x $mpiexec ]] || mpiexec=$(command -v mpiexec)
if [[ -n ${MPICH:-} ]]; then
    library=$(find "$(realpath "$MPICH")" -name libmpi.so.12 -print -quit)
    [[ -n $library ]] || {
        echo "gpu_session.sh: no libmpi.so.12 below $MPICH; unpack a wheel of mpich there" >&2
        exit 2
    }
    export MPI4PY_LIBMPI=$library
    programs=${library%/lib/*}/bin
    chmod u+x "$programs"/mpiexec* "$programs"/hydra_* # unzip drops it
    mpiexec=$programs/mpiexec
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

# What the tests write is kept in this folder; so is the cache of kernels if there is none yet.
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export TMPDIR=$scratch PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-$scratch/cupy}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

model="--layers 12 --d-model 768 --heads 12 --seq-len 1024 --batch-size 32 --repeats 10"
vocabularies="50257 50304" # GPT-2's, and the next multiple of 128
kernels="--heads 12"
overlap="iall-reduce ring --overlap 8 --begin-bytes 1M --end-bytes 64M --factor 8 --seconds 2"
tests="-m gpu tests"
patience=1 # times the limit of a part
if [[ -n ${REHEARSE:-} ]]; then
    model="--layers 1 --d-model 32 --heads 2 --seq-len 32 --batch-size 2 --repeats 1"
    vocabularies="250 256"
    kernels="--rows 64 --width 32 --seq-len 32 --heads 1 --largest 64 --repeats 1"
    overlap="iall-reduce --overlap 1 --begin-bytes 1K --end-bytes 1K --warm-up 0 -n 1"
    tests="-m gpu tests/test_ops_devices.py"
    patience=10
fi

probe() { # print each thing of the list that is missing: NAME, or NAME: why
    [[ -n $mpiexec ]] || echo mpiexec
    timeout 60 "$python" - 2>&1 <<'END' || echo "GPU: the probe of python3 failed"
import importlib.util
for name in ("numpy", "ml_dtypes", "safetensors", "threadpoolctl", "tqdm", "pytest", "pytest_timeout",
             "hypothesis", "xdist"):
    if importlib.util.find_spec(name) is None:
        print(name)
try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    print("MPI:", str(error).splitlines()[0])
try:
    import cupy
    found = cupy.cuda.runtime.getDeviceCount()
    float((cupy.ones((2, 2)) @ cupy.ones((2, 2))).sum())
except Exception as error:
    print("GPU:", f"{type(error).__name__}: {error}".splitlines()[0])
try:
    import torch
    if not torch.cuda.is_available():
        print("torch: sees no GPU")
except ImportError:
    print("torch")
END
}

summary() { # add a line to the summary
    printf '%s\n' "$*" >>"$out/summary.txt"
}

failed=0
part() { # part NAME SECONDS "WHAT IT NEEDS" COMMAND...
    local name=$1 most=$(($2 * patience)) needs=$3 start=$SECONDS left=$((limit - SECONDS))
    local code need lacking=
    shift 3
    for need in $needs; do
        lacking+=$(grep -E "^$need(:|$)" <<<"$missing" | sed 's/^/; /')
    done
    [[ $left -gt 0 ]] || lacking="; $limit s are over"
    if [[ -n $lacking ]]; then
        summary "$(printf '%-18s skipped: %s' "$name" "${lacking:2}")"
        return
    fi
    printf '\n===== %s: %s\n' "$name" "$*"
    timeout --kill-after=5 "$((left < most ? left : most))" "$@"
    code=$?
    [[ $code == 0 ]] || failed=1
    summary "$(printf '%-18s %4d s  %s' "$name" $((SECONDS - start)) "$(verdict "$code")")"
    return "$code"
}

verdict() {
    case $1 in
    0) echo ok ;;
    124 | 137) echo "FAILED: ended at its time limit" ;;
    *) echo "FAILED: exit code $1" ;;
    esac
}

session() {
    local package="numpy ml_dtypes safetensors threadpoolctl tqdm GPU" missing size table workers=
    local step="-m bench.step --device cuda --dtype bfloat16 $model"
    missing=$(probe)
    echo "python: $python, $("$python" --version 2>&1); mpiexec: ${mpiexec:-none}"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
    # shellcheck disable=SC2086 # the words of a variable are words of the command
    {
        for size in $vocabularies; do
            part "step, V $size" 80 "$package" "$python" $step --sides own \
                --vocab-size "$size" --json "$out/step_$size.json"
        done
        part "step beside torch" 160 "$package torch" "$python" $step --sides best \
            --vocab-size "$size" --json "$out/step_torch.json" ||
            part "the same, eager" 60 "$package torch" "$python" $step --sides best \
                --no-compiled --vocab-size "$size" --json "$out/step_eager.json"
        for table in attention memory products tiles; do
            part "$table" 80 "$package" "$python" -m bench.tiles --device cuda $kernels \
                --tables "$table" --json "$out"
        done
        part interconnect 50 "$package MPI mpiexec" "$mpiexec" -n 2 "$python" \
            -m bench.interconnect --quick --seconds 30 --transport staged \
            --json "$out/interconnect.jsonl"
        part overlap 30 "$package MPI mpiexec" "$mpiexec" -n 2 "$python" -m bench.interconnect \
            $overlap --transport staged
        grep -q '^xdist' <<<"$missing" || workers="-n $((($(nproc) + 1) / 2)) --dist worksteal"
        part "gpu tests" "$limit" "$package pytest pytest_timeout hypothesis" "$python" -m pytest \
            -v --tb=short -p no:cacheprovider --color=no $workers $tests
    }
    printf '\n===== summary: %d s\n' "$SECONDS"
    cat "$out/summary.txt"
    return "$failed"
}

session </dev/null 2>&1 | tee "$out/session.log"
exit "${PIPESTATUS[0]}"
