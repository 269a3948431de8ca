"""What the commands of other distributions use, without torch."""

from rlhf.commands.main import main
from rlhf.config.source_names import is_local
from rlhf.config.structure import section_class, setting_name
from rlhf.folder.disk import check_path, write_file
from rlhf.folder.run_folder import EXTRA_FILE, is_running, model_folder, read_json, read_lines
from rlhf.launch.caches import cache_root
from rlhf.launch.proxies import is_local_host
from rlhf.registry.installed import (
    NotInstalled,
    find_backend,
    installed,
    is_satisfied,
    known_plugins,
)
from rlhf.request.reader import Request, read_config
from rlhf.request.settings_tree import flow, leaves, load_yaml, parse_yaml

__all__ = [
    "EXTRA_FILE",
    "NotInstalled",
    "Request",
    "cache_root",
    "check_path",
    "find_backend",
    "flow",
    "installed",
    "is_local",
    "is_local_host",
    "is_running",
    "is_satisfied",
    "known_plugins",
    "leaves",
    "load_yaml",
    "main",
    "model_folder",
    "parse_yaml",
    "read_config",
    "read_json",
    "read_lines",
    "section_class",
    "setting_name",
    "write_file",
]
