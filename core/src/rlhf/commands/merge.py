"""`rlhf merge`: merge a LoRA adapter into its base model."""

import shutil
from argparse import ArgumentParser
from pathlib import Path

from rlhf.errors import RLHFError
from rlhf.plugin import CommandPlugin


def add_arguments(parser: ArgumentParser) -> None:
    """Add the two folders."""
    parser.add_argument("source", metavar="ADAPTER")
    parser.add_argument("output", metavar="OUTPUT", help="a new folder")


plugin = CommandPlugin(
    help="merge a LoRA adapter into its base model",
    run="rlhf.commands.merge:merge_command",
    arguments=add_arguments,
)


def merge_command(source: str, output: str) -> int:
    """Write base and adapter to the new folder `output`, with the adapter's tokenizer; returns 0.

    `source` is an adapter folder, or a run folder whose `model/` is one.
    """
    # late: start-up time
    from transformers.utils.logging import disable_progress_bar

    from rlhf.folder.disk import new_folder
    from rlhf.folder.run_folder import holds_run
    from rlhf.model.adapters import adapter_settings, merged
    from rlhf.model.exported import exported_model, exported_tokenizer, task_of
    from rlhf.model.extra import exported_extra, save_extra
    from rlhf.model.save import PROCESSOR_FILES, save_weights
    from rlhf.model.stored import damaged_file
    from rlhf.registry.imports import complete_export

    disable_progress_bar()
    with new_folder(Path(output)) as target:
        adapter = adapter_folder(Path(source))
        settings = adapter_settings(str(adapter))
        if damaged := damaged_file(adapter, ["generation_config.json"]):
            raise damaged
        model = merged(exported_model(adapter, task_of(settings.task_type)))
        save_weights(model, model.state_dict(), target)
        if (adapter / "tokenizer_config.json").is_file():
            exported_tokenizer(adapter).save_pretrained(target)
        save_extra(exported_extra(adapter), target)
        for name in ("generation_config.json", *PROCESSOR_FILES):
            if (adapter / name).is_file():
                shutil.copyfile(adapter / name, target / name)
        if holds_run(adapter.parent):
            complete_export(target, adapter.parent)
    print(f"merged {adapter} into {settings.base_model_name_or_path} and wrote {output}")
    return 0


def adapter_folder(path: Path) -> Path:
    """Return the folder with the adapter's config: `path` or `path`/model."""
    for folder in (path, path / "model"):
        if (folder / "adapter_config.json").is_file():
            return folder
    if not path.exists():
        raise RLHFError(f"{path} does not exist; pass an adapter folder or a run folder")
    raise RLHFError(f"{path} is not an adapter folder: it has no adapter_config.json")
