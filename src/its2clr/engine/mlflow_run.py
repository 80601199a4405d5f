"""The numbers of a run in MLflow, where a person asks for it (`engine.loggers: [mlflow]`).

The server is the one that MLflow's own variables name, never a recipe or run. One that does not answer when a run is
opened is an error; later it is a warning, what was not sent is sent with what follows, and the training goes on.
"""

import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from its2clr.errors import InputError, extra_needed
from its2clr.files import read_json, write_json

FILE = "mlflow.json"
RETRY_SECONDS = 60.0
_LONGEST_VALUE = 500
_MOST_AT_ONCE = 500
_MLFLOW = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # a training does not wait for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}


class MlflowRun:
    """A run in MLflow that belongs to a run folder: the one that `mlflow.json` there names, or a new one.

    Args:
        folder: The run folder.
        parameters: Settings, noted when the run begins.
        say: Prints a line.

    Raises:
        InputError: MLflow is not installed, no server is named, or it does not answer.
    """

    def __init__(self, folder: Path, parameters: Mapping[str, Any], say: Callable[[str], None]) -> None:
        for name, value in _MLFLOW.items():
            os.environ.setdefault(name, value)
        with extra_needed("engine.loggers=[mlflow]", "mlflow"):
            from mlflow.tracking import MlflowClient
        address = os.environ.get("MLFLOW_TRACKING_URI", "")
        self._server = _without_password(address)
        if not address:
            raise InputError(
                "engine.loggers: MLflow has no server; set MLFLOW_TRACKING_URI, such as http://HOST:5000 or "
                "sqlite:////home/me/mlflow.db"
            )
        logging.getLogger("mlflow").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
        self._say, self._waiting, self._next_try = say, list[Any](), 0.0
        try:
            self._client = MlflowClient(address)
            self._id = self._known(folder) or self._begin(folder, parameters)
        except Exception as error:
            raise InputError(
                f"engine.loggers: MLflow at {self._server} cannot be used ({_in_one_line(error)}); start it, or train "
                "without it: --set engine.loggers=[]"
            ) from error

    def _known(self, folder: Path) -> str | None:
        """The id of the run that the folder names, if the server still has it."""
        from mlflow.exceptions import MlflowException

        if not (folder / FILE).is_file():
            return None
        known = str(read_json(folder / FILE).get("run_id", ""))
        try:
            there: bool = self._client.get_run(known).info.lifecycle_stage == "active"
        except MlflowException as error:
            if error.error_code not in {"RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"}:
                raise
            there = False
        if not there:
            self._say(f"mlflow: {self._server} has no run {known!r} any more; a new one is begun")
        return known if there else None

    def _begin(self, folder: Path, parameters: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "its2clr"
        found = self._client.get_experiment_by_name(name)
        experiment = self._client.create_experiment(name) if found is None else found.experiment_id
        tags = {"its2clr.folder": str(folder.resolve())}
        begun: str = self._client.create_run(experiment, tags=tags, run_name=folder.resolve().name).info.run_id
        given = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in parameters.items()]
        for start in range(0, len(given), 100):
            self._client.log_batch(begun, params=given[start : start + 100])
        write_json(folder / FILE, {"run_id": begun})
        self._say(f"mlflow: run {begun} of experiment {name} at {self._server}")
        return begun

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send numbers of a step; if that fails, with those of a later one."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name, float(value), now, step) for name, value in values.items()]
        if time.monotonic() >= self._next_try:
            self._try(self._send)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """The run is running in the block; then it is finished, stopped or failed."""
        self._set("RUNNING")
        try:
            yield
        except BaseException as error:
            self._set("FAILED" if isinstance(error, Exception) else "KILLED")
            raise
        self._set("FINISHED")

    def _set(self, status: str) -> None:
        self._try(self._send)
        self._try(lambda: self._client.update_run(self._id, status=status))

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:_MOST_AT_ONCE])
            del self._waiting[:_MOST_AT_ONCE]

    def _try(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - whatever happens over there, the training goes on
            if not self._next_try:
                self._say(
                    f"warning: mlflow: {self._server} does not take numbers ({_in_one_line(error)}); the training goes "
                    "on, and they are sent later; metrics.jsonl has them all"
                )
            self._next_try = time.monotonic() + RETRY_SECONDS
        else:
            self._next_try = 0.0


def _in_one_line(error: Exception) -> str:
    return _without_password(" ".join(str(error).split()))[:200] or type(error).__name__


def _without_password(text: str) -> str:
    return re.sub("//[^/@ ]*@", "//", text)
