"""The observer `bucket` copies checkpoints to a bucket, and `rlhf bucket` resumes from there."""

from pathlib import Path

import fsspec
from attrs import frozen

from rlhf import RLHFError, run
from rlhf.cli import Request
from rlhf.hookspecs import RunRecord, hookimpl
from rlhf.plugin import CommandPlugin, ObserverPlugin

MANIFEST = "manifest.json"
"""Proves that a checkpoint is complete, so it is copied last."""


@frozen(kw_only=True)
class BucketConfig:
    """Copies of checkpoints in a bucket."""

    url: str = ""
    """Folder of this run, such as s3://bucket/run."""


def put(url: str, folder: Path, *parts: Path) -> None:
    """Copy the files of a run folder and these folders in it, but no checkpoint that is there."""
    bucket, root = fsspec.url_to_fs(url)
    files = [path for path in folder.glob("[!.]*") if path.is_file()]
    for part in parts:
        manifest, there = part / MANIFEST, f"{root}/{part.relative_to(folder)}/{MANIFEST}"
        if bucket.exists(there) and bucket.cat_file(there) == manifest.read_bytes():
            continue
        files += sorted(filter(Path.is_file, part.rglob("*")), key=lambda path: path == manifest)
    for path in files:
        target = f"{root}/{path.relative_to(folder)}"
        bucket.makedirs(target.rpartition("/")[0], exist_ok=True)
        bucket.put_file(str(path), target)


def get(url: str, folder: Path) -> None:
    """Copy the files of a run and its newest complete checkpoint, if there is one."""
    bucket, root = fsspec.url_to_fs(url)
    complete = bucket.glob(f"{root}/checkpoints/step-*/{MANIFEST}")
    for newest in sorted(complete, key=lambda path: (len(path), path))[-1:]:
        files = {*bucket.find(root, maxdepth=1), *bucket.find(newest.rpartition("/")[0])}
        for path in sorted(files, key=lambda path: path == newest):
            target = folder / path.removeprefix(f"{root}/")
            target.parent.mkdir(parents=True, exist_ok=True)
            bucket.get_file(path, str(target))


class Bucket:
    def __init__(self, config: BucketConfig) -> None:
        self.url = config.url

    @hookimpl
    def on_checkpoint(self, run: RunRecord, directory: Path) -> None:
        put(self.url, run.folder, directory)


def resume(request: Request) -> int:
    """Fetch what a new folder lacks, train, and copy what the observer had no time to copy."""
    section = request.config.observers.by_name.get("bucket", BucketConfig())
    output = request.config.output or ""
    if not section.url or not output or "://" in output or request.overwrite:
        raise RLHFError(
            "rlhf bucket needs observers.bucket.url and a local --output, no --overwrite"
        )
    if not any(Path(output).glob(f"checkpoints/step-*/{MANIFEST}")):
        get(section.url, Path(output))
    done = run(request.config, nproc=request.nproc, resume=request.resume or True)
    folders = done.folder.glob("checkpoints/step-*"), done.folder.glob("model*")
    put(section.url, done.folder, *(path for each in folders for path in each))
    return 143 if done.ended == "signal" else 0


observer = ObserverPlugin(config=BucketConfig, hooks="rlhf_bucket:Bucket")
command = CommandPlugin(
    help="resume a run from its bucket, and train", run="rlhf_bucket:resume", takes="run"
)
