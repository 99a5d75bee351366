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
                self.attempt(self.commit)
            if due:
                self.attempt(self.save, step)
        return True

    def attempt(self, function, *arguments) -> None:
        """Call a function that saves; if it fails, warn, in the same way on every rank."""
        try:
            function(*arguments)
        except OutputError as error:
            self.log(f"WARNING: {error}; the next save tries again")

    def commit(self) -> None:
        """Commit the save in flight, if there is one. Comm: that of `Saver.commit`."""
        before, blocked = self.saver.saved, self.saver.blocked_seconds
        self.saver.commit()
        if self.saver.saved != before:
            self.tell(blocked)

    def save(self, step: int) -> None:
        """Save the whole state; with --save-async it is written while the next steps run.

        Raises OutputError on every rank. Comm: that of before() and `Saver`.
        """
        self.before()
        before, blocked = self.saver.saved, self.saver.blocked_seconds
        self.saver.save(step)
        if self.saver.saved == step:
            self.tell(self.saver.blocked_seconds)
        elif self.saver.saved != before:  # the previous save had to be committed first
            self.tell(blocked)

    def save_last(self, step: int) -> None:
        """Save the state after the last step, unless a checkpoint has it; wait until it is written.

        Raises OutputError on every rank. Comm: that of `save`.
        """
        self.attempt(self.commit)
        if self.saver.saved != step:
            start = perf_counter()
            self.before()
            self.saver.save(step)
            self.saver.finish()
            self.log(f"\nsaved step {step}: {perf_counter() - start:.2f} s blocked")

    def tell(self, blocked: float) -> None:
        """Print what the last committed save has cost."""
        text = f"saved step {self.saver.saved}: {blocked:.2f} s blocked"
        if self.run.save_async:
            text += f", {self.saver.write_seconds:.2f} s beside training"
        self.log(text)
