"""Numbers for TensorBoard, on the disk as soon as they are added.

The usual writer holds them back for two minutes in a thread, so a killed run loses them, and a full disk is a traceback
of that thread.
"""

import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from its2clr.files import disk_full_said


class EventFile:
    """A new event file.

    Args:
        folder: Where it goes; made if missing.
        first: Its first step. TensorBoard forgets what older files of the folder say of this step and later ones.
    """

    def __init__(self, folder: Path, first: int) -> None:
        name = f"{time.time():017.6f}.{platform.node()}.{os.getpid()}"  # TensorBoard reads them in the order of names
        self._path = folder / f"events.out.tfevents.{name}"
        folder.mkdir(parents=True, exist_ok=True)
        self._write(
            Event(wall_time=time.time(), file_version="brain.Event:2"),
            Event(wall_time=time.time(), step=first, session_log=SessionLog(status=SessionLog.START)),
        )

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers of a step.

        Raises:
            DiskFullError: There is no room for them.
        """
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._write(Event(wall_time=time.time(), step=step, summary=summary))

    def _write(self, *events: Event) -> None:
        with disk_full_said(self._path), self._path.open("ab") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
