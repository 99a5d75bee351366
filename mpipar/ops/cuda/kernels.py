"""The CUDA kernels: their names, and the text of their files.

This file has only names and text, so tests and tools can read them without CuPy or a GPU.
"""

import re
from collections import namedtuple
from math import inf
from pathlib import Path

import numpy as np

from mpipar.ops.cuda import attention, fused, ladder

FOLDER = Path(__file__).parent
# What a kernel gets for a Python number: all int parameters have 32 bits, all others are float.
SCALARS = {int: np.int32, float: np.float32}
INCLUDE = re.compile(r'^#include "(\w+\.cuh)"$', re.MULTILINE)

# File -> the instantiations of its kernels that are used, as name expressions.
KERNELS = {
    **ladder.used(),
    **fused.used(),
    **attention.used(),
}
# Which kernels compute attention, by function of ops. file: that of its kernels, which take heads
# of up to `widest` elements. Hkv may be any divisor of H, Tq and Tk any lengths. Wider heads go to
# the plain formula of `array_attention` on CuPy; it uses the softmax of `wider` if one is named.
TakenBy = namedtuple("TakenBy", "file widest wider")
ATTENTION = {
    "attention_forward": TakenBy("flash_forward.cu", attention.MOST_WIDTH, "softmax.cu"),
    "attention_backward_input": TakenBy("flash_backward.cu", attention.MOST_WIDTH, "softmax.cu"),
    "attention_block_forward": TakenBy("flash_forward.cu", attention.MOST_WIDTH, None),
    "attention_block_backward": TakenBy("flash_backward.cu", attention.MOST_WIDTH, None),
    "attention_delta": TakenBy("flash_backward.cu", inf, None),
    "attention_merge": TakenBy(None, 0, None),
}
# File -> most registers per thread that its kernels may use; 128 by default. Attention keeps a
# head's width of sums in registers, so it may use all that there are.
REGISTERS = {"gemm_naive.cu": 40, "gemm_shared.cu": 40, "gemm_register.cu": 96,
             "flash_forward.cu": 255, "flash_backward.cu": 255}


def source(file, folders=(FOLDER,)):
    """Return the text of a .cu file, with its own headers put in place of their includes.

    CuPy's compile cache sees only this text, so a changed header must be in it. folders: where
    files are looked for; the first that has one wins. Line numbers in messages of the compiler stay
    those of the files.
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
