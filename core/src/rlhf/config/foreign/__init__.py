"""The settings of other projects: a table for each, which `rlhf migrate`, error messages and
docs/migrate.md read. Core's configuration and its migration import it."""

from rlhf.config.foreign.axolotl import AXOLOTL
from rlhf.config.foreign.llama_factory import LLAMA_FACTORY
from rlhf.config.foreign.openrlhf import OPENRLHF
from rlhf.config.foreign.project import Project, Rule, Variant
from rlhf.config.foreign.trl import TRL

__all__ = ["FOREIGN", "PROJECTS", "REMOVED", "Project", "Rule", "Variant"]

PROJECTS = {
    "trl": TRL,
    "axolotl": AXOLOTL,
    "llamafactory": LLAMA_FACTORY,
    "openrlhf": OPENRLHF,
}
"""By the name that `rlhf migrate --from` takes."""
FOREIGN = {
    name: rule.ours
    for project in reversed(PROJECTS.values())
    for name, rule in project.keys.items()
    if rule.ours
}
"""Our name by theirs, as in `'learning_rate' is optim.lr here`."""
REMOVED = {"offload": "full", "reference": "rowwise"}
"""Values of earlier versions, and what replaces them (of `model.recompute`, `model.fp8`)."""
