"""An MLflow run for each rlhf run, which a resumed run continues.

It goes through a client of its own, so MLflow's active run and address in this process stay as they
are.
"""

import time
from base64 import b64decode
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import mlflow
from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from rlhf.hookspecs import RunRecord, curves, hookimpl, sample_table
from rlhf_observer_mlflow import MlflowConfig

TAG = "rlhf.run"
AT_ONCE = 100
"""Parameters that MLflow takes in one request."""


class Mlflow:
    """Sends configuration and plans as parameters, curves as metrics, samples as artifacts, the
    newest checkpoint as a tag."""

    def __init__(self, config: MlflowConfig) -> None:
        self._config = config
        address = urlsplit(config.uri or mlflow.get_tracking_uri())
        self.remedy = ""
        if address.netloc:
            # Without user and password.
            server = f"{address.scheme}://{address.netloc.rpartition('@')[2]}"
            self.remedy = (
                f"without a connection to {server}, set observers.mlflow.uri to a local store, "
                "such as sqlite:///mlflow.db"
            )

    @hookimpl
    def on_start(self, run: RunRecord) -> None:
        client = self._client = MlflowClient(tracking_uri=self._config.uri)
        name = self._config.experiment
        known = client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else client.create_experiment(name)
        found = client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'")
        new = found or [client.create_run(experiment, tags={TAG: run.id}, run_name=run.folder.name)]
        self._id = new[0].info.run_id
        client.update_run(self._id, status="RUNNING")
        # MLflow refuses another value for a parameter, and a resumed run may have one.
        kept = new[0].data.params
        plans = {f"plan.{role}": plan["summary"] for role, plan in run.plan.items()}
        values = {**run.settings, **plans}
        params = [Param(name, str(value)) for name, value in values.items() if name not in kept]
        for first in range(0, len(params), AT_ONCE):
            client.log_batch(self._id, params=params[first : first + AT_ONCE])

    @hookimpl
    def on_step(self, run: RunRecord, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        values = [Metric(name, value, now, step) for name, value in curves(metrics).items()]
        self._client.log_batch(self._id, metrics=values)

    on_eval = on_step

    @hookimpl
    def on_samples(self, run: RunRecord, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        columns, rows = sample_table(step, samples)
        folder = f"samples/step-{step:06}"
        pictures = {sample["row"]: sample["images"] for sample in samples if sample.get("images")}
        if pictures:
            names = self._log_images(pictures, folder)
            columns = [*columns, "images"]
            rows = [[*row, names.get(row[1], [])] for row in rows]
        self._client.log_dict(self._id, {"columns": columns, "data": rows}, f"{folder}.json")

    def _log_images(
        self, pictures: Mapping[str, Sequence[str]], folder: str
    ) -> dict[str, list[str]]:
        """Log data URLs in JPEG, by their rows, as artifacts in `folder`; return their paths."""
        names = {}
        with TemporaryDirectory() as local:
            for number, (row, urls) in enumerate(pictures.items(), 1):
                names[row] = [f"{number}-{place}.jpg" for place in range(1, len(urls) + 1)]
                for name, url in zip(names[row], urls, strict=True):
                    (Path(local) / name).write_bytes(b64decode(url.partition(",")[2]))
            self._client.log_artifacts(self._id, local, folder)
        return {row: [f"{folder}/{name}" for name in each] for row, each in names.items()}

    @hookimpl
    def on_checkpoint(self, run: RunRecord, step: int, directory: Path) -> None:
        self._client.set_tag(self._id, "checkpoint", str(directory))

    @hookimpl
    def on_finish(self, run: RunRecord, error: BaseException | None) -> None:
        self._client.set_terminated(self._id, "FINISHED" if error is None else "FAILED")
