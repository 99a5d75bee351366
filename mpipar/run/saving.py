"""Saving: when a run saves its state, what it prints, and what happens if a save fails."""

from __future__ import annotations

from time import perf_counter

from mpipar.errors import OutputError


class Saving:
    """The saves of one run; every rank calls the same methods at the same step.

    saver: what writes. run: the RunConfig. before(): runs before each save. It writes all metrics
    so far to disk, so that what precedes a checkpoint never needs its steps repeated, and refuses
    weights that are not finite.
    """

    def __init__(self, saver, run, before, log):
        self.saver, self.run, self.before, self.log = saver, run, before, log

    def after_step(self, step: int, votes) -> bool:
        """Commit what all ranks have written, and save if it is time or a rank asks for it.

        A failure is reported, and the next save tries again. Return whether there was work to do.
        Comm: that of `Saver`.
        """
        due = votes.save or (self.run.save_interval and step % self.run.save_interval == 0)
        if not (due or votes.written):
            return False
        with self.saver.worker.recorder.at("save"):
            if votes.written:
                self.attempt(self.saver.commit)
            if due:
                self.attempt(lambda: self.save(step))
        return True

    def attempt(self, function) -> None:
        """Call a function that commits a save, and print what it has cost.

        If it fails, warn, in the same way on every rank.
        """
        saver, before, blocked = self.saver, self.saver.saved, self.saver.blocked_seconds
        try:
            function()
        except OutputError as error:
            self.log(f"WARNING: {error}; the next save tries again")
        if saver.saved == before:
            return
        if self.run.save_async:  # a later save may have begun, and blocked for another time
            self.log(
                f"saved step {saver.saved}: {blocked:.2f} s blocked,"
                f" {saver.write_seconds:.2f} s beside training"
            )
        else:
            self.log(f"saved step {saver.saved}: {saver.blocked_seconds:.2f} s blocked")

    def save(self, step: int) -> None:
        """Save the whole state; with --save-async it is written while the next steps run.

        Raises OutputError on every rank. Comm: that of before() and `Saver`.
        """
        self.before()
        self.saver.save(step)

    def save_last(self, step: int) -> None:
        """Save the state after the last step, unless a checkpoint has it; wait until it is written.

        Raises OutputError on every rank. Comm: that of `save`.
        """
        self.attempt(self.saver.commit)
        if self.saver.saved != step:
            start = perf_counter()
            self.save(step)
            self.saver.finish()
            self.log(f"\nsaved step {step}: {perf_counter() - start:.2f} s blocked")
