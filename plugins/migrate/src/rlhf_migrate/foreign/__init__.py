"""The settings of other projects: a table for each, which `rlhf migrate`, error messages and
docs/migrate.md read."""

from rlhf_migrate.foreign.axolotl import AXOLOTL
from rlhf_migrate.foreign.llama_factory import LLAMA_FACTORY
from rlhf_migrate.foreign.openrlhf import OPENRLHF
from rlhf_migrate.foreign.project import Project, Rule, Variant
from rlhf_migrate.foreign.trl import TRL

__all__ = ["FOREIGN", "PROJECTS", "Project", "Rule", "Variant"]

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
