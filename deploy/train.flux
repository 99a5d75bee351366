#!/usr/bin/env bash
# mpipar train under Flux, which starts this script once per rank. From the top of the repository:
#
#     flux submit -N 2 -n 8 --time-limit=60m --signal=SIGUSR1@120s \
#         deploy/train.flux --out runs/first --layout dp=4,pp=2
#
# 120 s before the time limit the ranks get SIGUSR1; they finish the step, save and exit with 75.
# The same command continues the run.
set -euo pipefail
# shellcheck source=/dev/null
source "${MPIPAR_VENV:-$PWD/.venv}/bin/activate"
exec mpipar train --resume auto "$@"
