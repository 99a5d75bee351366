"""`mpipar generate RUN --prompt TEXT`: its flags; `generation` does it."""

from dataclasses import dataclass
from importlib import import_module

from mpipar.commands.command import Command, Context
from mpipar.config.setting import positional, setting


@dataclass(frozen=True)
class Arguments:
    """The model, and a file of prompts with the file of its answers."""

    run_folder: str = positional(
        "RUN", "a run folder of mpipar train, a folder of weights, or a checkpoint")
    prompts: str | None = setting(
        None, "continue each line of a file, or the prompt of each object of a .jsonl file; writes"
        " lines of JSON", metavar="FILE")
    answers: str | None = setting(
        None, "where --prompts writes; must be new (default: standard output)", metavar="FILE")


def run(context: Context) -> int:
    """Continue texts. Comm: that of `generation.run`."""
    return import_module("mpipar.commands.generation").run(context)


COMMAND = Command(
    run, "RUN --prompt TEXT | --prompts FILE [flags]", Arguments, needs_mpi=True,
    fields=frozenset({
        "prompt", "sample_tokens", "temperature", "top_k", "top_p", "stop_token", "seed",
        "batch_size", "num_microbatches", "dp", "pp", "cp", "tp", "rank_order", "device", "dtype",
        "kernels", "gemm", "tf32", "hang_warn", "hang_stop"}),
    help_of={
        "prompt": "the text to continue (default 'The ')",
        "sample_tokens": "tokens to add to each prompt (default 200)",
        "seed": "fixes the draws, for every layout (default 0)",
        "batch_size": "prompts that are continued at the same time (default: 8 for each group and"
                      " dp copy)",
        "num_microbatches": "groups of prompts in the pipeline at the same time (default: pp)",
        "cp": "must be 1, because a text grows by one token at a time"})
