"""`rlhf serve`: an exported reward model behind HTTP, and the check of any such server."""

import os
import secrets
import signal
import socket
from pathlib import Path
from typing import Any

import torch
import uvicorn
from transformers.utils.logging import disable_progress_bar

from rlhf.cli import model_folder
from rlhf.errors import RLHFError, first_line
from rlhf.scorer import Scorer, open_scorer
from rlhf_serve.app import Service
from rlhf_serve.check import check_server

TOKEN = "RLHF_TOKEN"
"""Environment variable of the token."""


def serve_command(
    model: str,
    data: str | None,
    *,
    check: str | None,
    host: str,
    port: int,
    token: str | None,
    max_tokens: int,
    queue: int,
    device: str | None,
    dtype: str,
) -> int:
    """Serve a model folder or a run until SIGTERM or Ctrl-C, or check the server at `check`; return
    the exit code."""
    if (check is None) != (data is None):
        raise RLHFError("--check URL and DATA belong together: rlhf serve --check URL MODEL DATA")
    token = token or os.environ.get(TOKEN) or (secrets.token_urlsafe(24) if check is None else None)
    token = None if token == "none" else token
    listener = None if check else bind(host, port)
    disable_progress_bar()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    default = accelerator.type if accelerator else "cpu"
    if device is not None:
        check_device(device, default)
    folder = model_folder(Path(model))
    scorer = open_scorer(folder, device=device or default, dtype=dtype)
    if check is not None and data is not None:
        return check_server(check, scorer, data, token)
    assert listener is not None
    return serve(scorer, listener, token=token, max_tokens=max_tokens, queue=queue)


def check_device(device: str, default: str) -> None:
    """Raise RLHFError if torch cannot use a device here."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise RLHFError(
            f"--device {device} cannot be used ({first_line(error)}); remove it to use {default}"
        ) from error


def bind(host: str, port: int) -> socket.socket:
    """Return a socket at the address, which does not listen yet."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        listener.close()
        raise RLHFError(
            f"cannot serve at {host} port {port} ({first_line(error)}); choose another --port or "
            "--host"
        ) from error
    return listener


def serve(
    scorer: Scorer, listener: socket.socket, *, token: str | None, max_tokens: int, queue: int
) -> int:
    """Answer requests until a signal, then those that are waiting; return 0."""
    positions = getattr(scorer.config.get_text_config(), "max_position_embeddings", None)
    longest = min(max_tokens, positions or max_tokens)
    path = scorer.pack(longest=longest)
    service = Service(scorer, token=token, max_tokens=max_tokens, longest=longest, queue=queue)
    options: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
    server = uvicorn.Server(uvicorn.Config(service.app(), **options))
    # uvicorn raises the signal again after the last answer.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    host = f"[{host}]" if ":" in host else host
    kind = type(scorer.module.causal).__name__
    print(f"model      {scorer.folder} ({kind}, {scorer.precision} on {scorer.device})")
    print(f"attention  {path}")
    print(f"token      {'none: anybody may send requests' if token is None else token}")
    listener.listen()
    print(f"serving    http://{host}:{port}", flush=True)
    server.run([listener])
    return 0
