"""`rlhf migrate`: its record and arguments."""

from argparse import ArgumentParser

from rlhf.plugin import CommandPlugin, positive


def add_arguments(parser: ArgumentParser) -> None:
    """Add the file and what is known of it."""
    parser.add_argument("source", metavar="FILE", help="YAML, JSON or a shell script")
    text = "the file to write; default: standard output"
    parser.add_argument("-o", "--output", metavar="FILE", help=text)
    text = "trl, axolotl, llamafactory or openrlhf, with a trainer as in trl/dpo; default: detected"
    parser.add_argument("--from", dest="chosen", metavar="PROJECT", help=text)
    text = "devices that it was run on, a factor of batch.size; default: as its launcher says"
    parser.add_argument("--gpus", type=positive(int), metavar="N", help=text)


plugin = CommandPlugin(
    help="convert a configuration of TRL, Axolotl, LLaMA-Factory or OpenRLHF",
    run="rlhf_migrate.command:migrate_command",
    arguments=add_arguments,
)
