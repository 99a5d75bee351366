"""The CUDA kernels: which there are, and the text of their files.

Only names and text, so that tests and tools can read them where there is neither CuPy nor a GPU.
"""

import re
from collections import namedtuple
from math import inf
from pathlib import Path

import numpy as np

from mpipar.ops.cuda import attention, fused, ladder

FOLDER = Path(__file__).parent
# What a kernel gets where Python says a number: all int parameters are 32 bits, all others float.
SCALARS = {int: np.int32, float: np.float32}
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

# File -> the instantiations of its kernels that are used, as name expressions.
KERNELS = {
    **ladder.used(),
    **fused.used(),
    **attention.used(),
}
# Which kernels compute attention, by function of ops. file: that of its kernels, which take heads
# of up to `widest` elements; Hkv may be any divisor of H, Tq and Tk any lengths. Wider heads go to
# the plain formula of `array_attention` on CuPy, with the softmax of `wider` in it if one is named.
TakenBy = namedtuple("TakenBy", "file widest wider")
ATTENTION = {
    "attention_forward": TakenBy("flash_forward.cu", attention.MOST_WIDTH, "softmax.cu"),
    "attention_backward_input": TakenBy("flash_backward.cu", attention.MOST_WIDTH, "softmax.cu"),
    "attention_block_forward": TakenBy("flash_forward.cu", attention.MOST_WIDTH, None),
    "attention_block_backward": TakenBy("flash_backward.cu", attention.MOST_WIDTH, None),
    "attention_delta": TakenBy("flash_backward.cu", inf, None),
    "attention_merge": TakenBy(None, 0, None),
}
# File -> most registers per thread that its kernels may use; where nothing is said, 128. Attention
# keeps a head's width of sums in registers: all that there are.
REGISTERS = {"gemm_naive.cu": 40, "gemm_shared.cu": 40, "gemm_register.cu": 96,
             "flash_forward.cu": 255, "flash_backward.cu": 255}


def source(file, folders=(FOLDER,)):
    """Return the text of a .cu file with its own headers put in place of their includes.

    One text without own includes is what CuPy's compile cache can tell apart from an older one.
    folders: where files are looked for, the first that has one wins.
    Line numbers in messages of the compiler stay those of the files.
    """
    seen = set()

    def read(name):
        path = next(folder / name for folder in folders if (folder / name).exists())
        text = path.read_text().replace("#pragma once\n", "\n")
        return f'#line 1 "{path}"\n' + INCLUDE.sub(
            lambda match: include(match[1], path, text[: match.start()].count("\n") + 2), text)

    def include(name, path, next_line):
        if name in seen:
            return ""
        seen.add(name)
        return f'{read(name)}\n#line {next_line} "{path}"'

    return read(file)
