"""A cost model with round numbers, for the tests that read one."""

from dataclasses import replace
from itertools import product

from mpipar.config.grid import GridConfig
from mpipar.config.resolve import resolve
from mpipar.config.sections import Config
from mpipar.config.train import TrainConfig
from mpipar.plan.machine import (
    Contention,
    Curve,
    Duplex,
    Eager,
    Machine,
    Passes,
    Piece,
    Product,
    Units,
    settings_of,
)

CONFIG = Config(train=TrainConfig(batch_size=16))
OPERATIONS = ("latency", "all-reduce", "iall-reduce")
LATENCY_US, LARGE_US, US_PER_BYTE = 5.0, 20.0, 1e-3


def config_of(layers=4, num_microbatches=4, rows=2, **axes):
    """The default model on a layout, with microbatches of `rows` rows."""
    dp = axes.get("dp", 1)
    return resolve(
        replace(
            CONFIG,
            model=replace(CONFIG.model, layers=layers),
            grid=GridConfig(
                **{"dp": 1, "pp": 1, "tp": 1} | axes, num_microbatches=num_microbatches
            ),
            train=replace(CONFIG.train, batch_size=dp * rows * num_microbatches),
        ),
        dp * axes.get("pp", 1) * axes.get("tp", 1),
    )[0]


def curve(operation, link, ranks, slow=1.0):
    """A curve of 5 us up to 1 KiB, and from there to 4 MiB of 20 us plus 1 us per 1000 bytes."""
    return Curve(
        operation,
        link,
        ranks,
        (8, 1024, 4 << 20),
        (
            Piece(0.0, 1024.0, *[LATENCY_US * slow] * 3, 0.0, 0.0, 0.0),
            Piece(1024.0, float(4 << 20), *[LARGE_US * slow] * 3, *[US_PER_BYTE * slow] * 3),
        ),
        100,
        0.02,
        0.3,
    )


def machine() -> Machine:
    """A cost model: passes of the default model with 2 rows; groups of 2 and 4 ranks; two links."""
    model = settings_of(config_of().model)
    curves = [curve(operation, "same node", ranks) for operation in OPERATIONS for ranks in (2, 4)]
    curves += [curve(operation, "between nodes", 2, 3.0) for operation in OPERATIONS[:1]]
    return Machine(
        tuple(curves),
        (Duplex("same node", 0.7),),
        (Eager("same node", 1 << 20),),
        (
            Contention("iall-reduce", "dp", 4096, 1.5),
            Contention("iall-reduce", "tp", 4096, 1.7),
            Contention("iall-reduce", "dp", 65536, 1.9),
        ),
        0.7,
        tuple(Product(m, k, n, 1e-9 * m * k * n) for m, k, n in product((32, 128), repeat=3)),
        (
            Units(
                model,
                "float32",
                "adamw",
                1,
                2,
                Passes(1e-4, 0.0, 2e-4),
                Passes(1e-3, 1.5e-3, 1e-3),
                Passes(2e-3, 2e-3, 1e-3),
                2e-9,
            ),
        ),
        8,
        8,
        {"date": "2026-01-01"},
    )
