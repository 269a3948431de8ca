"""`rlhf serve`: its record and arguments."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add the model, where it is served, and the check."""
    parser.usage = "rlhf serve [options] MODEL, or rlhf serve --check URL MODEL DATA"
    parser.add_argument("model", metavar="MODEL", help="a run of rm or prm, or a model folder")
    parser.add_argument("data", metavar="DATA", nargs="?", help="rows to send with --check")
    text = "send rows to this URL and print the largest difference; exit 1 if it is large"
    parser.add_argument("--check", metavar="URL", help=text)
    text = "the address to listen at; default: 127.0.0.1, which only this machine reaches"
    parser.add_argument("--host", default="127.0.0.1", help=text)
    text = "default: 8000; 0 takes a free one"
    parser.add_argument("--port", type=int, default=8000, help=text)
    text = "what clients must send; none: nothing; default: RLHF_TOKEN, else a new one is printed"
    parser.add_argument("--token", help=text)
    text = "tokens of a forward pass, and of the longest prompt with an answer; default: 8192"
    parser.add_argument("--max-tokens", type=positive(int), default=8192, metavar="N", help=text)
    text = "requests that may wait; more are refused with 503; default: 256"
    parser.add_argument("--queue", type=positive(int), default=256, metavar="N", help=text)
    parser.add_argument("--device", help="such as cpu or cuda:1; default: cuda if there is one")
    dtypes = ("auto", "fp32", "bf16", "fp16")
    text = "auto, the default, is that of the folder"
    parser.add_argument("--dtype", choices=dtypes, default="auto", help=text)


plugin = CommandPlugin(
    help="serve an exported reward model over HTTP, or compare a server with it",
    run="rlhf_serve.command:serve_command",
    arguments=add_arguments,
)
