"""Event files for TensorBoard (the extra `tensorboard`): the numbers of metrics.jsonl as curves."""

import importlib.util
import time
from contextlib import contextmanager
from pathlib import Path

from mpipar.run.files import no_links
from mpipar.run.process.streams import warn

FOLDER = "tensorboard"  # in the run folder; each start of a run adds a file
TAGS = {
    "loss": "loss/training",
    "held_out_loss": "loss/held_out",
    "lr": "learning_rate",
    "grad_norm": "gradient_norm",
    "loss_scale": "loss_scale",
    "tokens_per_second": "speed/tokens_per_second",
    "step_seconds": "speed/step_seconds",
    "comm_share_mean": "communication/share_mean",
    "comm_share_max": "communication/share_max",
}


def tensorboard_problems(config) -> list[str]:
    """Return a problem if --tensorboard is given but its extra is not installed."""
    wrong = (
        "--tensorboard: the package tensorboard is not installed: pip install"
        " '.[tensorboard]', or leave --tensorboard out; metrics.csv has the same numbers"
    )
    is_missing = config.run.tensorboard and importlib.util.find_spec("tensorboard") is None
    return [wrong] * is_missing


class Events:
    """Writes one event file; any failure is reported once, and the run continues.

    first_step: the first step of this start of the run. TensorBoard drops it and later steps from
    older files.
    """

    def __init__(self, run_folder: Path, first_step: int):
        self.writer = None
        with self._failures_are_said():
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self.writer = EventFileWriter(str(no_links.folder(run_folder, FOLDER, make=True)))
            self._event(first_step, session_log=SessionLog(status=SessionLog.START))

    @contextmanager
    def _failures_are_said(self):
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the run is worth more than its curves
            self.writer = None
            warn(f"no more event files for TensorBoard: {error}; the run continues")

    def _event(self, step: int, **content) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self.writer.add_event(Event(wall_time=time.time(), step=step, **content))

    def add(self, line: dict) -> None:
        """Add the numbers of a line of metrics.jsonl or evaluations.jsonl."""
        if self.writer is not None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            known = {tag: line[name] for name, tag in TAGS.items() if line.get(name) is not None}
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in known.items()]
            with self._failures_are_said():
                self._event(line["step"], summary=Summary(value=values))

    def sync(self) -> str:
        """Pass all events to the system; there is nothing to report."""
        with self._failures_are_said():
            if self.writer is not None:
                self.writer.flush()
        return ""

    def close(self) -> None:
        """Write what is left, and close the file."""
        with self._failures_are_said():
            if self.writer is not None:
                self.writer.close()
