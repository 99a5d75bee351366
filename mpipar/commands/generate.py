"""`mpipar generate RUN --prompt TEXT`: its flags; see `generation` for the work itself."""

from dataclasses import dataclass

from mpipar.commands.command import Command, Context
from mpipar.config.run import TEMPERATURE
from mpipar.config.setting import positional, setting


@dataclass(frozen=True)
class Arguments:
    """The model, what it continues, and how tokens are drawn."""

    run_folder: str = positional(
        "RUN", "a run folder of mpipar train, a folder of weights, or a checkpoint"
    )
    prompt: str | None = setting(None, "the text to continue (default 'The ')")
    prompts: str | None = setting(
        None, "continue each line of a file, and print a line of JSON for each", metavar="FILE"
    )
    sample_tokens: int = setting(200, "tokens to add to each prompt", low=0, high=2**20)
    temperature: float = setting(
        TEMPERATURE,
        "sampling temperature: higher = more random; 0 = always the most likely token",
        low=0.0,
    )
    top_k: int = setting(50, "draw each token from the N most likely ones", low=1, high=2**20)
    top_p: float = setting(
        1.0,
        "and of these only from the first ones whose probabilities add up to X",
        above=0.0,
        high=1.0,
    )
    stop_token: tuple[int, ...] = setting(
        (), "ids that end a text (default: the tokenizer's end of text)", low=0
    )


def run(context: Context) -> int:
    """Continue texts. Comm: that of `generation.run`."""
    from mpipar.run import generation  # late: it loads NumPy

    return generation.run(context.session, context.parsed, context.args)


COMMAND = Command(
    run,
    "RUN --prompt TEXT | --prompts FILE [flags]",
    Arguments,
    needs_mpi=True,
    fields=frozenset(
        {
            "seed",
            "batch_size",
            "num_microbatches",
            "dp",
            "pp",
            "cp",
            "tp",
            "rank_order",
            "device",
            "dtype",
            "kernels",
            "gemm",
            "hang_warn",
            "hang_stop",
        }
    ),
    help_of={
        "seed": "determines the random draws, for every layout (default 0)",
        "batch_size": "prompts that are continued at the same time (default: 8 for each group and"
        " dp replica)",
        "num_microbatches": "groups of prompts in the pipeline at the same time (default: pp)",
        "cp": "must be 1, because a text grows by one token at a time",
    },
)
