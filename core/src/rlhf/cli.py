"""What the commands of other distributions use, without torch."""

from rlhf.commands.main import main
from rlhf.config.source_names import is_local
from rlhf.config.structure import section_class, setting_name
from rlhf.folder.disk import write_file
from rlhf.folder.recorded import Curve, Recorded, is_run, model_folder, read_newest, read_run
from rlhf.folder.run_folder import EXTRA_FILE
from rlhf.folder.template import filled, number, print_table
from rlhf.launch.proxies import is_local_host
from rlhf.registry.installed import NotInstalled
from rlhf.request.reader import Request
from rlhf.request.settings_tree import flow, leaves, load_yaml, parse_yaml

__all__ = [
    "EXTRA_FILE",
    "Curve",
    "NotInstalled",
    "Recorded",
    "Request",
    "filled",
    "flow",
    "is_local",
    "is_local_host",
    "is_run",
    "leaves",
    "load_yaml",
    "main",
    "model_folder",
    "number",
    "parse_yaml",
    "print_table",
    "read_newest",
    "read_run",
    "section_class",
    "setting_name",
    "write_file",
]
