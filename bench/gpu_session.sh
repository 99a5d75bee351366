#!/usr/bin/env bash
# One visit to a machine with a GPU, within ten minutes: the tests marked gpu, messages by way of
# pinned host memory, alone and while the GPU multiplies, the kernels beside cuBLAS, and a training
# step beside PyTorch.
#
#     bash bench/gpu_session.sh
#     OUT=FOLDER PYTHON=/opt/venv/bin/python3 LIMIT=300 bash bench/gpu_session.sh
#
# The script installs and downloads nothing. It skips a part that misses a package, an MPI or a GPU;
# the table at the end says what is missing. The folder OUT (gpu-session) gets at most 8 files:
# session.log with all that was printed, and one JSON file for each table.
#
# Exit code: 0 if no part failed that ran, 1 if one did, 2 if nothing can be started.
set -u

out=${OUT:-gpu-session}
limit=${LIMIT:-600} # seconds in all
python=$(command -v "${PYTHON:-python3}") || {
    echo "gpu_session.sh: no ${PYTHON:-python3}; name one with PYTHON=FILE" >&2
    exit 2
}
mkdir -p "$out" && out=$(cd "$out" && pwd) && [[ -w $out && -z $(ls -A "$out") ]] || {
    echo "gpu_session.sh: $out can't be written or is not empty; name another with OUT=FOLDER" >&2
    exit 2
}
python=$(realpath -s "$python") # not through links: a virtual environment is one
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

# Caches of compiled kernels and what the tests write go with this folder.
scratch=$(mktemp -d) || exit 2
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM
export TMPDIR=$scratch CUPY_CACHE_DIR=$scratch/cupy PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

mpiexec=$(dirname "$python")/mpiexec
[[ -x $mpiexec ]] || mpiexec=$(command -v mpiexec)

probe() { # print each thing of the list that is missing: NAME, or NAME: why
    [[ -n $mpiexec ]] || echo mpiexec
    timeout 60 "$python" - 2>&1 <<'EOF' || echo "GPU: the probe of python3 did not end well"
import importlib.util
for name in ("numpy", "ml_dtypes", "safetensors", "threadpoolctl", "pytest", "pytest_timeout",
             "hypothesis"):
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
EOF
}

summary=()
failed=0
part() { # part NAME SECONDS "WHAT IT NEEDS" COMMAND...
    local name=$1 most=$2 needs=$3 start=$SECONDS left=$((limit - SECONDS)) code need lacking=
    shift 3
    for need in $needs; do
        lacking+=$(grep -E "^$need(:|$)" <<<"$missing" | sed 's/^/; /')
    done
    [[ $left -gt 0 ]] || lacking="; $limit s are over"
    if [[ -n $lacking ]]; then
        summary+=("$(printf '%-16s skipped: %s' "$name" "${lacking:2}")")
        return
    fi
    printf '\n===== %s: %s\n' "$name" "$*"
    timeout --kill-after=5 "$((left < most ? left : most))" "$@"
    code=$?
    [[ $code == 0 ]] || failed=1
    summary+=("$(printf '%-16s %4d s  %s' "$name" $((SECONDS - start)) "$(verdict "$code")")")
}

verdict() {
    case $1 in
    0) echo ok ;;
    124 | 137) echo "FAILED: ended at its time limit" ;;
    *) echo "FAILED: exit code $1" ;;
    esac
}

session() {
    local package="numpy ml_dtypes safetensors threadpoolctl GPU" missing dtype
    missing=$(probe)
    echo "python: $python, $("$python" --version 2>&1); mpiexec: ${mpiexec:-none}"
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null
    part "gpu tests" 200 "$package pytest pytest_timeout hypothesis" \
        "$python" -m pytest -q -m gpu -p no:cacheprovider --color=no tests
    part interconnect 60 "$package MPI mpiexec" "$mpiexec" -n 2 "$python" -m bench.interconnect \
        --quick --transport staged --json "$out/interconnect.jsonl"
    part overlap 40 "$package MPI mpiexec" "$mpiexec" -n 2 "$python" -m bench.interconnect \
        iall-reduce ring --overlap 8 --begin-bytes 1M --end-bytes 64M --factor 8 --seconds 2 \
        --transport staged
    part tiles 150 "$package" "$python" -m bench.tiles --device cuda --json "$out"
    for dtype in float32 bfloat16; do
        part "step $dtype" 70 "$package MPI" "$python" -m bench.step --device cuda \
            --dtype "$dtype" --json "$out/step_$dtype.json"
    done
    printf '\n===== summary: %d s\n' "$SECONDS"
    printf '%s\n' "${summary[@]}"
    return "$failed"
}

session </dev/null 2>&1 | tee "$out/session.log"
exit "${PIPESTATUS[0]}"
