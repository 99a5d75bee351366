#!/usr/bin/env bash
# A visit of eight minutes to a machine with a GPU, in two halves on one machine, from cold caches.
# First: is every function right? Where does a step of GPT-2 124M spend its time, and how long does
# the same step take in PyTorch? Second: small steps, experts, attention and products alone, several
# ranks on the GPU through staged MPI, and chosen tests.
#
#     bash bench/gpu_session.sh first           # and `second`; without a word, both
#     OUT=FOLDER PYTHON=/opt/venv/bin/python3 MPICH=mpich-wheel bash bench/gpu_session.sh first
#     REHEARSE=1 bash bench/gpu_session.sh      # small sizes: tests/elsewhere/cuda_machine/README.md
#
# Needs Python with CuPy, and what mpipar imports. The script installs and downloads nothing. It
# skips parts that lack a package, an MPI or a GPU, and says so. MPICH names a folder with an
# unpacked wheel `mpich` (pip download mpich; unzip mpich-*.whl -d mpich-wheel).
#
# Each part has its own time limit; LIMIT is that of both halves together. The folder OUT
# (gpu-session) gets one archive for each half, which is complete after each part: logs, tables as
# JSON, and a summary. The tables are printed last, in at most 12,000 characters.
#
# Exit code: 0 if no part failed that ran, 1 if one did, 2 if nothing can be started.
set -u

halves=${1:-first second}
out=${OUT:-gpu-session}
limit=${LIMIT:-480} # seconds in all; a half has just over one half of them
python=$(command -v "${PYTHON:-python3}") || {
    echo "gpu_session.sh: no ${PYTHON:-python3}; name one with PYTHON=FILE" >&2
    exit 2
}
[[ $halves =~ ^(first|second|first second)$ ]] || {
    echo "gpu_session.sh: $halves: say first or second, or nothing for both" >&2
    exit 2
}
archive=${halves// /-and-}.tar.gz
mkdir -p "$out" && out=$(cd "$out" && pwd) && [[ -w $out && ! -e $out/$archive ]] || {
    echo "gpu_session.sh: $out can't be written or has $archive; name another with OUT=FOLDER" >&2
    exit 2
}
[[ $halves == "first second" ]] || limit=$((limit * 25 / 48))
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

# Compiled kernels outlive the first half; all else that is written is packed, or goes.
export CUPY_CACHE_DIR=${CUPY_CACHE_DIR:-${TMPDIR:-/tmp}/mpipar-gpu-session-kernels}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
mkdir "$work/results" "$work/scratch"
export TMPDIR=$work/scratch PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES-0} # ranks share one device
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1

model="--layers 12 --d-model 768 --heads 12 --seq-len 1024 --vocab-size 50304 --dtype bfloat16"
llama="--preset llama-110m --seq-len 4096 --batch-size 4 --dtype bfloat16"
experts="--arch mixtral --layers 12 --d-model 768 --heads 12 --seq-len 1024 --vocab-size 32000
    --batch-size 8 --dtype bfloat16"
train="--layers 4 --d-model 256 --heads 4 --seq-len 256 --batch-size 16 --num-microbatches 4"
batch=32 check='' functions='' attention='' ladder='' patience=1
tests="tests/elsewhere/cuda/test_cuda_attention.py tests/elsewhere/cuda/test_cuda_kernels.py
    tests/elsewhere/cuda/test_cuda_ops.py tests/unit/study/test_memory_predicted.py"
chosen="same_bits or every_function_on_a_gpu or step_is or equals_plain or predicted_memory"
if [[ -n ${REHEARSE:-} ]]; then
    model="--layers 1 --d-model 32 --heads 2 --seq-len 32 --vocab-size 256 --dtype bfloat16"
    llama="--arch llama --layers 1 --d-model 32 --heads 2 --kv-heads 1 --seq-len 32 --batch-size 2
        --dtype bfloat16"
    experts="--arch mixtral --layers 1 --d-model 32 --heads 2 --seq-len 32 --batch-size 2
        --dtype bfloat16"
    train="--layers 2 --d-model 16 --heads 2 --seq-len 8 --batch-size 4 --num-microbatches 2"
    batch=2 check=--small functions="--small --repeats 1" patience=10
    attention="--tokens 64 --repeats 1" ladder="--largest 64 --repeats 1"
    tests="tests/elsewhere/cuda/test_cuda_ops.py" chosen="equals_plain and float64 and shuffled"
fi

probe() { # print each thing of the list that is missing: NAME, or NAME: why
    [[ -n $mpiexec ]] || echo mpiexec
    command -v compute-sanitizer >/dev/null || echo compute-sanitizer
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

pack() { # pack all results so far; an archive is whole at any time
    tar -czf "$out/$archive.new" -C "$work/results" . && mv "$out/$archive.new" "$out/$archive"
}

failed=0 number=0
part() { # part NAME SECONDS "WHAT IT NEEDS" COMMAND...
    local name=$1 most=$(($2 * patience)) needs=$3 start=$SECONDS left=$((limit - SECONDS))
    local code need lacking='' log said
    shift 3
    number=$((number + 1))
    log=$work/results/$(printf '%02d-%s.log' "$number" "${name// /-}")
    for need in $needs; do
        lacking+=$(grep -E "^$need(:|$)" <<<"$missing" | sed 's/^/; /')
    done
    [[ $left -gt 0 ]] || lacking="; $limit s are over"
    if [[ -n $lacking ]]; then
        said="skipped: ${lacking:2}"
    else
        echo "\$ $*" >"$log"
        timeout --kill-after=5 "$((left < most ? left : most))" "$@" >>"$log" 2>&1
        code=$?
        case $code in
        0) said=ok ;;
        124 | 137) said="FAILED: ended at its time limit" ;;
        *) said="FAILED: exit code $code" ;;
        esac
        [[ $code == 0 ]] || failed=1
    fi
    printf '%-22s %4d s  %s\n' "$name" $((SECONDS - start)) "$said" | tee -a "$work/results/summary.txt"
    pack
}

bench() { # bench NAME SECONDS NEEDS PROGRAM FLAGS...: a program of bench/, and its table as JSON
    local name=$1 seconds=$2 needs=$3 program=$4
    shift 4
    part "$name" "$seconds" "$package $needs" "$python" -m "bench.$program" "$@" \
        --json "$work/results/${name// /-}.json"
}

machine() {
    nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
    "$python" --version
    "$python" -m mpipar doctor
}

layouts() { # the losses of several layouts on one GPU, which must be those of one rank
    local layout count=1
    for layout in "" dp=2 tp=2 pp=2 dp=2,tp=2; do
        count=$([[ -z $layout ]] && echo 1 || "$python" -c "print($(sed 's/[a-z]*=//g; s/,/*/g' <<<"$layout"))")
        echo "$count ranks, ${layout:-alone}"
        # shellcheck disable=SC2086
        "$mpiexec" -n "$count" "$python" -m mpipar train --device cuda $train --steps 5 \
            --eval-tokens 64 --sample-tokens 0 ${layout:+--layout $layout} \
            --out "$work/scratch/run-${layout:-alone}" >"$work/scratch/train.log" 2>&1 ||
            { tail -n 20 "$work/scratch/train.log"; return 1; }
    done
    "$python" - "$work"/scratch/run-*/metrics.jsonl <<'END'
import json, sys
found = {path.split("run-")[1].split("/")[0]: [json.loads(line)["loss"] for line in open(path)]
         for path in sys.argv[1:]}
print("| layout | losses | ms of a step |\n| --- | --- | --- |")
for path in sys.argv[1:]:
    name = path.split("run-")[1].split("/")[0]
    rows = [json.loads(line) for line in open(path)]
    print(f"| {name} | {' '.join(f'{one:.5f}' for one in found[name])} |",
          f"{1e3 * min(row['step_seconds'] for row in rows):.4g} |")
worst = max(abs(a - b) / b for own in found.values() for a, b in zip(own, found["alone"]))
sys.exit(f"losses differ by {worst:.1e}" if worst > 1e-4 or len(found) < 5 else 0)
END
}

first() {
    part machine 20 GPU bash -c machine
    bench check 100 "" kernels.check $check
    part races 30 "$package compute-sanitizer" compute-sanitizer --tool racecheck --error-exitcode 1 \
        "$python" -m bench.kernels.check --small
    bench "step by function" 60 "" kernels.functions $model --batch-size $batch $functions
    bench "step beside torch" 110 torch step --device cuda $model --batch-size $batch --sides best \
        --repeats 5
}

second() {
    local size workers=
    for size in 1 4; do
        bench "batch $size" 15 "" kernels.functions $model --batch-size $size $functions
    done
    bench "llama" 25 "" kernels.functions $llama $functions
    bench "experts" 35 "" kernels.functions $experts $functions
    bench "attention" 35 "" kernels.attention $attention
    bench "products" 25 "" kernels.ladder $ladder
    part layouts 60 "$package MPI mpiexec" bash -c layouts
    grep -q '^xdist' <<<"$missing" || workers="-n 4 --dist worksteal"
    part tests 45 "$package pytest pytest_timeout hypothesis" "$python" -m pytest -q --tb=short \
        -p no:cacheprovider --color=no $workers -m "gpu and not slow" -k "$chosen" $tests
}

tables() { # the end of each part's log: a table's first rows, and the lines below it
    local log
    for log in "$work"/results/*.log; do
        printf '\n== %s\n' "$(basename "$log" .log)"
        sed 1d "$log" | grep -v -e '^| ---' -e Warning -e '^ *self\.' | awk '
            { line[NR] = substr($0, 1, /^[|]/ ? 150 : 700) }
            END { for (i = 1; i <= NR; i++) if (i <= 13 || i > NR - 3) print line[i] }'
    done | head -c 11000
}

export -f machine layouts
export python mpiexec work train
package="numpy ml_dtypes safetensors threadpoolctl tqdm GPU"
missing=$(probe)
echo "$python, $("$python" --version 2>&1); mpiexec: ${mpiexec:-none}"
for half in $halves; do
    # shellcheck disable=SC2086,SC2094 # the words of a variable are words of the command
    "$half" </dev/null
done
echo "$SECONDS s, $(tar -tzf "$out/$archive" | grep -c '[a-z]$') files in $archive"
tables
exit "$failed"
