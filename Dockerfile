# mpipar with MPICH from its wheel, for CPUs: neither a compiler nor an MPI of the system is needed.
#
#     docker build -t mpipar .
#     docker run --rm mpipar                                      # four ranks train a small model
#     docker run --rm -v "$PWD/runs:/home/mpipar/runs" mpipar mpiexec -n 4 mpipar train --steps 50
#
# Several hosts, from a cluster's own MPI: see deploy/apptainer.def.
FROM python:3.12-slim

WORKDIR /opt/mpipar
COPY setup.cfg pyproject.toml README.md LICENSE ./
COPY mpipar ./mpipar
RUN pip install --no-cache-dir '.[mpich,cpu,text]'

# Training writes below the working folder; nothing needs to be done as root.
RUN useradd --create-home mpipar
USER mpipar
WORKDIR /home/mpipar

# Ranks of one container share its memory: MPICH's ring buffers need more than Docker's 64 MiB of
# /dev/shm for many ranks (docker run --shm-size=1g).
CMD ["mpiexec", "-n", "4", "mpipar", "train"]
