"""Right and wrong answers to every exercise of `mpipar learn`, found by hand."""

import inspect

from mpipar.layers import loss
from mpipar.partition import column, row

NUMBERS = {
    "1a": "5",
    "1b": "1024",
    "2a": "198,272",
    "2b": "16777216 16777216 16777216",
    "3a": "9",
    "3b": "6",
    "4a": "8.3 22",
    "4b": "22 4",
    "4c": "12.7 15.6",
    "5a": "27",
    "5c": "27.3 27.3",
    "6a": "96",
    "7a": "792",
    "7b": "1176",
    "7c": "1.80",
    "8a": "4.79",
    "9a": "7 4 1",
    "9b": "tp",
    "10a": "13.8 %",
    "11b": "4 0 3",
    "12a": "16",
    "12b": "64",
    "12c": "40 100",
    "13a": "1/128",
    "13b": "32,768",
    "13c": "16384",
    "14a": "12.7",
    "14b": "47",
    "15a": "18",
    "16a": "7.99",
    "16b": "3670528 2097664",
    "16c": "12.75",
    "17a": "48",
    "17b": "4 2.29",
    "17c": "5",
}

# A twin's letter is its place in the alphabetical order of the causes.
LAYOUTS = {"15b": ("pp=4,tp=8 --sequence-parallel", "pp=4,tp=2,dp=4"), "15c": ("tp=8", "pp=4,dp=2")}

RING = """
def all_reduce(comm, x):
    pieces = x.reshape(comm.size, -1)
    for step in range(2 * (comm.size - 1)):
        adds = step < comm.size - 1
        out, into = comm.neighbor(-step), comm.neighbor(-step - 1)
        came = pieces[into].copy()
        arriving = comm.irecv(came, comm.neighbor(-1), 0, "ring")
        leaving = comm.isend(pieces[out].copy(), comm.neighbor(1), 0, "ring")
        arriving.wait()
        leaving.wait()
        pieces[into] = pieces[into] + came if adds else came
"""
EVERYBODY_TO_EVERYBODY = """
def all_reduce(comm, x):
    own = x.copy()
    for step in range(1, comm.size):
        came = own.copy()
        arriving = comm.irecv(came, comm.neighbor(-step), 0, "all")
        leaving = comm.isend(own, comm.neighbor(step), 0, "all")
        arriving.wait()
        leaving.wait()
        x += came
"""
COLLECTIVE = "def all_reduce(comm, x):\n    comm.all_reduce(x, 'cheat')\n"
LINEAR = "def backward_weight(here, x, dy, dw):\n    dw += x.T @ dy\n"


def code(module):
    return inspect.getsource(module)


WITHOUT_SUM = code(row).replace(
    "here.comm.all_reduce(here.product.matmul(x, w), here.name)", "here.product.matmul(x, w)"
)
SUMMED_TWICE = code(row).replace(
    "return here.product.matmul_nt(dy, w), dy",
    "return here.comm.all_reduce(here.product.matmul_nt(dy, w), here.name), dy",
)
HALF = code(row).replace(
    "product.matmul_tn_add(x, dy, dw)", "product.matmul_tn_add(x[:1], dy[:1], dw)"
)
OWN_LOSS = code(loss).replace("self.comm.all_gather(stats, self.name)", "stats[None]")
# Exercise: a right file, and (wrong file, what the verdict says).
FILES = {
    "3c": (
        RING,
        [
            (EVERYBODY_TO_EVERYBODY, "bytes, but a ring"),
            (COLLECTIVE, "use only isend and irecv"),
            ("def all_reduce(comm, x):\n    pass\n", "x[0] is 1, but must be 11"),
        ],
    ),
    "6b": (
        code(row),
        [
            (
                WITHOUT_SUM,
                (
                    "all_reduce block*.ffn.down in F: 0 times, and 4 in"
                    " mpipar/partition/row.py: the sum is missing"
                ),
            ),
            (SUMMED_TWICE, "a complete sum is summed again"),
            (HALF, "look at what is computed between them"),
        ],
    ),
    "7d": (code(loss), [(OWN_LOSS, "the other ranks' parts are missing")]),
}
LINEAR_FILES = [
    (LINEAR.replace("+=", "[:] ="), "it was overwritten"),
    (LINEAR.replace("dw += x.T @ dy", "dw = x.T @ dy"), "dw is unchanged"),
    (LINEAR.replace("x.T @ dy", "2 * x.T @ dy"), "must grow by"),
]
assert "".join((WITHOUT_SUM, SUMMED_TWICE, HALF)).count("def forward") == 3
assert code(row) not in (WITHOUT_SUM, SUMMED_TWICE, HALF)
assert code(loss) != OWN_LOSS
assert "backward_weight" in code(column)
