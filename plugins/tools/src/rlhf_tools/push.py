"""`rlhf push`: upload the model folder of a run to a hub. Only weights in safetensors, tokenizer,
config and card are uploaded."""

from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import disable_progress_bars

from rlhf.cli import EXTRA_FILE, model_folder
from rlhf.errors import RLHFError, counted, first_line

HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
"""Base of the errors of the HTTP library, which is not the same in all releases of huggingface_hub.
"""
UPLOADED = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
    "adapter_config.json", "README.md", "chat_template.jinja", "tokenizer.json", "tokenizer.model",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "vocab.txt", "merges.txt", "spiece.model",
)  # fmt: skip
"""Names of the files that are uploaded; all others stay here."""


def push_command(run: str, name: str, *, private: bool) -> int:
    """Upload RUN/model, or a model folder, to the repository `name` in one commit; returns 0."""
    folder = model_folder(Path(run))
    files = uploaded_files(folder)
    disable_progress_bars()
    api = HfApi()
    if get_token() is None:
        raise RLHFError(f"no token for {api.endpoint}; run `hf auth login` or set HF_TOKEN")
    try:
        repository = api.create_repo(name, private=private, exist_ok=True)
        if private and not api.model_info(repository.repo_id).private:
            raise RLHFError(f"{name} exists and is public; choose another name or omit --private")
        added = [CommitOperationAdd(str(path.relative_to(folder)), path) for path in files]
        message = f"Upload {folder.name} with rlhf"
        api.create_commit(repository.repo_id, added, commit_message=message)
    except HFValidationError as error:
        raise RLHFError(f"{name!r} is not a name of a repository: {first_line(error)}") from error
    except HfHubHTTPError as error:
        reason = error.server_message or first_line(error)
        code = error.response.status_code
        raise RLHFError(f"{api.endpoint} refused {name} ({code}): {reason}") from error
    except (HTTP_ERROR, ConnectionError) as error:
        raise RLHFError(
            f"cannot reach {api.endpoint} ({first_line(error)}); check the network and HF_ENDPOINT"
        ) from error
    print(f"uploaded {counted(len(files), 'file')} of {folder} to {repository}")
    return 0


def uploaded_files(folder: Path) -> list[Path]:
    """Return the files of a model folder that are uploaded, by name."""
    places = [*sorted(folder.iterdir()), folder / EXTRA_FILE]
    files = (path for path in places if path.is_file() and not path.is_symlink())
    return [path for path in files if any(fnmatch(path.name, pattern) for pattern in UPLOADED)]
