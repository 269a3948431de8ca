"""Rows with images: files and rows become texts with placeholders and inputs of the model."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, MediaPlugin, positive


def fetch_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `rlhf fetch`."""
    parser.add_argument("data", metavar="ROWS", help="what data.train takes: a file, a folder, ...")
    parser.add_argument("output", metavar="FOLDER", help="gets rows.jsonl and the folder images")
    text = "downloads at the same time; default: 16"
    parser.add_argument("--workers", type=positive(int), default=16, metavar="N", help=text)
    text = "leave out rows with an image that cannot be downloaded"
    parser.add_argument("--drop", action="store_true", help=text)


plugin = MediaPlugin(reader="rlhf_vision.reader:Images", values="rlhf_vision.values:known_values")
fetch_plugin = CommandPlugin(
    help="download the images that rows name by URL",
    run="rlhf_vision.fetch:fetch_command",
    arguments=fetch_arguments,
)
