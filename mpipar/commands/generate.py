"""`mpipar generate RUN --prompt TEXT`: its flags; see `generation` for the work itself."""

from dataclasses import dataclass
from importlib import import_module

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting


@dataclass(frozen=True)
class Arguments:
    """The model, a file of prompts, and a file for the answers."""

    run_folder: str = positional(
        "RUN", "a run folder of mpipar train, a folder of weights, or a checkpoint"
    )
    prompts: str | None = setting(
        None,
        "continue each line of a file, or the prompt of each object in a .jsonl file; writes"
        " lines of JSON",
        metavar="FILE",
    )
    answers: str | None = setting(
        None, "output file for --prompts; must be new (default: standard output)", metavar="FILE"
    )


def run(context: Context) -> int:
    """Continue texts. Comm: that of `generation.run`."""
    return import_module("mpipar.commands.generation").run(context)


COMMAND = Command(
    run,
    "RUN --prompt TEXT | --prompts FILE [flags]",
    Arguments,
    needs_mpi=True,
    fields=frozenset(
        {
            "prompt",
            "sample_tokens",
            "temperature",
            "top_k",
            "top_p",
            "stop_token",
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
            "tf32",
            "hang_warn",
            "hang_stop",
        }
    ),
    help_of={
        "prompt": "the text to continue (default 'The ')",
        "sample_tokens": "tokens to add to each prompt (default 200)",
        "seed": "determines the random draws, for every layout (default 0)",
        "batch_size": "prompts that are continued at the same time (default: 8 for each group and"
        " dp replica)",
        "num_microbatches": "groups of prompts in the pipeline at the same time (default: pp)",
        "cp": "must be 1, because a text grows by one token at a time",
    },
)
