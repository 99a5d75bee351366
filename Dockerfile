# mpipar with the MPICH wheel, for CPUs: needs neither a compiler nor a system MPI.
#
#     docker build -t mpipar .
#     docker run --rm mpipar                                      # four ranks train a small model
#     docker run --rm -v "$PWD/runs:/home/mpipar/runs" mpipar mpiexec -n 4 mpipar train --steps 50
#
# For several hosts with a cluster's own MPI, see deploy/apptainer.def.
FROM python:3.12-slim

WORKDIR /opt/mpipar
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY mpipar ./mpipar
RUN pip install --no-cache-dir '.[mpich,cpu,text]'

# Training writes below the working folder and does not need root.
RUN useradd --create-home mpipar
USER mpipar
WORKDIR /home/mpipar

# The ranks share the container's /dev/shm. With many ranks, MPICH's ring buffers need more than
# Docker's default of 64 MiB (docker run --shm-size=1g).
CMD ["mpiexec", "-n", "4", "mpipar", "train"]
