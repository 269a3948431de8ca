"""A small server with the routes of vLLM that the engine calls. Its model is one of transformers
with the weights that were sent to it, so its log-probabilities are those of a server."""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

GENERATE = "/inference/v1/generate"
Change = Callable[[Any], Any]
Fault = tuple[int, str] | Change | str
"""A status and a text instead of the response, a change of its JSON, `drop` to close the connection
without a response, `hang` to send none until the server is closed, or `die` to kill its process."""


class FakeVLLM(ThreadingHTTPServer):
    """Serves the model whose config is in a folder, at first with other weights than any trainer
    has."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, folder: Path, *, base: bool = False, port: int = 0, limit: int = 64) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        torch.manual_seed(17)
        if base:
            self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
        else:
            self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.model.eval()
        self.folder, self.limit, self.version = folder, limit, "default"
        self.adapters: dict[str, Any] = {}
        self.paused = self.updating = False
        self.lock, self.ended = threading.Lock(), threading.Event()
        self.calls: list[str] = []
        """The routes that were called, in order."""
        self.requests: list[dict[str, Any]] = []
        """Those for answers."""
        self.running = self.most_running = 0
        self.faults: dict[str, Fault] = {}
        self.after: dict[str, int] = {}
        """How many calls of a route have no fault."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing of clients that have closed their connections."""

    def fault(self, path: str) -> Fault | None:
        """Return what is to happen to this call."""
        if self.after.get(path, 0) > 0:
            self.after[path] -= 1
            return None
        return self.faults.get(path)

    def respond(self, path: str, body: Any) -> Any:
        """Return the JSON of a response, or a status and a text."""
        route = getattr(self, path.strip("/").replace("/", "_"), None)
        return (404, '{"detail":"Not Found"}') if route is None else route(body)

    def health(self, body: Any) -> Any:
        return {}

    def v1_models(self, body: Any) -> Any:
        return {"data": [{"id": "policy", "parent": None, "max_model_len": self.limit}]}

    def weight_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    def init_weight_transfer_engine(self, body: Any) -> Any:
        return {"message": "Weight transfer initialized"}

    def pause(self, body: Any) -> Any:
        self.paused = True
        return {"status": "paused"}

    def resume(self, body: Any) -> Any:
        self.paused = False
        return {"status": "resumed"}

    def start_weight_update(self, body: Any) -> Any:
        assert self.paused
        self.updating = True
        return {}

    def update_weights(self, body: Any) -> Any:
        assert self.updating
        weights = load_file(body["update_info"]["path"])
        try:
            unknown = self.model.load_state_dict(weights, strict=False).unexpected_keys
        except RuntimeError as error:
            return (500, str(error))
        return (500, f"unexpected {unknown}") if unknown else {}

    def finish_weight_update(self, body: Any) -> Any:
        self.updating, self.version = False, body["weight_version"]
        return {}

    def reset_prefix_cache(self, body: Any) -> Any:
        return {"success": True}

    def v1_load_lora_adapter(self, body: Any) -> Any:
        from peft import PeftModel  # late: start-up time

        name, path = body["lora_name"], body["lora_path"]
        if not self.adapters and not isinstance(self.model, PeftModel):
            self.model = PeftModel.from_pretrained(self.model, path, adapter_name=name)
        else:
            self.model.load_adapter(path, adapter_name=name)
        self.model.eval()
        self.adapters[name] = path
        return (200, f"Success: LoRA adapter '{name}' added successfully.")

    def v1_unload_lora_adapter(self, body: Any) -> Any:
        del self.adapters[body["lora_name"]]
        return (200, "Success")

    def inference_v1_generate(self, body: Any) -> Any:
        model, ids, asked = body["model"], body["token_ids"], body["sampling_params"]
        if model != "policy" and model not in self.adapters:
            return (404, f'{{"error":{{"message":"The model `{model}` does not exist."}}}}')
        if strange := [token for token in ids if token >= self.model.config.vocab_size]:
            message = f"Token id {strange[0]} is out of vocabulary"
            return (400, f'{{"error":{{"message":"{message}","code":400}}}}')
        if len(ids) + asked["max_tokens"] > self.limit:
            return (400, f'{{"error":{{"message":"maximum context length is {self.limit}"}}}}')
        assert not self.paused
        self.requests.append(body)
        with self.lock:
            if model in self.adapters:
                self.model.set_adapter(model)
            return self.answer(model, ids, asked)

    @torch.no_grad()
    def answer(self, model: str, ids: list[int], asked: dict[str, Any]) -> Any:
        """Return the response with one answer."""
        temperature, tokens, content = asked.get("temperature", 1.0), list(ids), list[Any]()
        generator = torch.Generator().manual_seed(asked.get("seed", 0))
        while len(content) < asked["max_tokens"]:
            logits = self.model(torch.tensor([tokens])).logits[0, -1].double()
            logprobs = (logits / (temperature or 1.0)).log_softmax(-1)
            token = int(logprobs.argmax())
            if temperature:
                token = int(torch.multinomial(logprobs.exp(), 1, generator=generator))
            tokens.append(token)
            content.append({"token_id": token, "logprob": float(logprobs[token])})
            if token in asked.get("stop_token_ids", ()):
                break
        known = None
        if "prompt_logprobs" in asked:
            logprobs = self.model(torch.tensor([ids])).logits[0, :-1].double().log_softmax(-1)
            pairs = zip(ids[1:], logprobs, strict=True)
            known = [None, *({str(token): {"logprob": float(of[token])}} for token, of in pairs)]
        drawn = [each["token_id"] for each in content]
        span = {"version": self.version, "start": 0, "end": len(drawn)}
        choice = {
            "index": 0, "finish_reason": "length", "token_ids": drawn, "weight_versions": [span],
            "logprobs": {"content": content},
        }  # fmt: skip
        return {"model": model, "choices": [choice], "prompt_logprobs": known}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Else the client waits 40 ms for each body.
    disable_nagle_algorithm = True
    server: FakeVLLM

    def do_GET(self) -> None:
        self.handle_call(None)

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.handle_call(json.loads(text) if text else None)

    def handle_call(self, body: Any) -> None:
        fake, path = self.server, self.path.partition("?")[0]
        with fake.lock:
            fake.calls.append(path)
            fault = fake.fault(path)
            fake.running += 1
            fake.most_running = max(fake.running, fake.most_running)
        try:
            response: Any = None
            if fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "hang":
                fake.ended.wait(60)
            if isinstance(fault, str):
                self.close_connection = True
                return
            response = fault if isinstance(fault, tuple) else fake.respond(path, body)
            if callable(fault):
                response = fault(response)
        finally:
            with fake.lock:
                fake.running -= 1
        status, text = response if isinstance(response, tuple) else (200, json.dumps(response))
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[FakeVLLM]:
    """Serve in a thread of this process."""
    fake = FakeVLLM(folder, **options)
    thread = threading.Thread(target=fake.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        fake.ended.set()
        fake.shutdown()
        fake.server_close()
        thread.join()


def wait_until(condition: Callable[[], bool], *, seconds: float = 10.0) -> bool:
    """Return whether a condition becomes true in time."""
    due = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > due:
            return False
        time.sleep(0.05)
    return True
