"""Products of a moment: which loops of BLAS are fast here, and whether several threads pay now.

As a program, for a child process, it prints one line of JSON: the library, the architecture of its
loops, and GFLOP/s of one thread.
"""

import json
import time

import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_info

ROWS, INNER, COLUMNS = 256, 384, 1536  # 0.3 GFLOP, a product of a small decoder
PRODUCTS = 10
ROUNDS, PRODUCTS_OF_ROUND = 6, 2
ENOUGH_SECONDS = 0.1  # where products wait for a core, one round tells as much


def product_seconds(count: int) -> list[float]:
    """The seconds of each of some equal products."""
    x, w = np.ones((ROWS, INNER), np.float32), np.ones((INNER, COLUMNS), np.float32)
    y, found = np.empty((ROWS, COLUMNS), np.float32), []
    for _ in range(count):
        start = time.perf_counter()
        np.matmul(x, w, out=y)
        found.append(time.perf_counter() - start)
    return found


def slowdown(threads: int) -> float:
    """How many times as long products take with so many threads as with one, at this moment.

    Both take turns. A product that must wait for a core counts, so the sums are compared.
    """
    blas = ThreadpoolController().select(user_api="blas")
    product_seconds(1)  # it makes BLAS's buffers
    seconds = dict.fromkeys((1, threads), 0.0)
    for _ in range(ROUNDS):
        if sum(seconds.values()) > ENOUGH_SECONDS:
            break
        for count in seconds:
            with blas.limit(limits=count):
                seconds[count] += sum(product_seconds(PRODUCTS_OF_ROUND))
    return seconds[threads] / seconds[1]


def main() -> None:
    """Measure, and print the line. Of the products the fastest counts."""
    gflops = 2e-9 * ROWS * INNER * COLUMNS / min(product_seconds(PRODUCTS))
    pool = next((one for one in threadpool_info() if one["user_api"] == "blas"), {})
    print(json.dumps({"library": pool.get("internal_api"), "gflops": gflops,
                      "architecture": pool.get("architecture")}))


if __name__ == "__main__":
    main()
