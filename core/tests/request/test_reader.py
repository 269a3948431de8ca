"""One checked configuration from defaults, trainer, YAML and words; every problem at once."""

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import pytest
import yaml
from attrs import field, frozen, validators

from rlhf.commands.config import describe
from rlhf.config.field_docs import field_docs
from rlhf.config.reference_modes import ReferenceMode
from rlhf.config.sections import Config, DataEntry, OptimConfig
from rlhf.config.structure import foreign_names, section_class, structure
from rlhf.errors import RLHFError
from rlhf.request.reader import config_class, read_config
from rlhf.request.settings_tree import changed_keys, merge, to_tree, without_removed
from rlhf.request.words import parse_words
from rlhf_devkit.distributions import Install

GIVEN = ("--model", "tiny", "--data", "rows.jsonl")


def read(*words: str) -> Any:
    return read_config("toy", overrides=[*GIVEN, *words]).config


def problems(*words: str, given: Sequence[str] = GIVEN) -> list[str]:
    """The lines of the error, without the head that counts several."""
    with pytest.raises(RLHFError) as caught:
        read_config("toy", overrides=[*given, *words])
    head, *lines = str(caught.value).splitlines()
    return [line.strip() for line in lines] or [head]


def yaml_file(folder: Path, text: str) -> str:
    path = folder / "config.yaml"
    path.write_text(text)
    return str(path)


def test_the_command_line_overrides_the_file_and_the_file_the_defaults(toy: Path) -> None:
    file = yaml_file(toy, "optim: {clip: 0.5, eps: 1e-6}\ntoy: {beta: 0.2}")
    config = read(file, "--toy.beta", "0.3", "--optim.weight-decay=0.1")
    assert (config.optim.lr, config.optim.clip, config.optim.eps) == (1e-6, 0.5, 1e-6)
    assert (config.optim.weight_decay, config.own.beta) == (0.1, 0.3)
    assert (config.trainer_name, config.backend_name, config.backend) == ("toy", "plain", "plain")
    assert config.backend_section.stage == "auto"


def test_a_value_for_a_section_sets_its_first_field(toy: Path) -> None:
    file = yaml_file(toy, "optim: 3e-5\nlora: 8\ndata: {eval: held.jsonl}\nplain: 1")
    config = read(file, "--batch", "4", "--lora.dropout", "0.1", "--checkpoint", "null")
    assert (config.model.path, config.batch.size, config.optim.lr) == ("tiny", 4, 3e-5)
    assert (config.lora.rank, config.lora.dropout, config.backend_section.stage) == (8, 0.1, 1)
    assert (config.data.train, config.data.eval) == (
        (DataEntry(path="rows.jsonl"),),
        (DataEntry(path="held.jsonl"),),
    )
    assert read(file, "--lora", "null").lora is None


def test_a_path_in_the_home_folder_is_that_path_wherever_it_is_written(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    file = yaml_file(toy, "output: ~/runs/a\nmodel: {adapter: ~/lora}")
    data = ("--data.train", "~/rows.jsonl", "--data.eval", "[a~/b, {path: ~/c}]")
    config = read(file, "--model=~/base", *data, "--data.chat_template", "~/chat.jinja")
    assert config.output == "/home/me/runs/a"
    assert (config.model.path, config.model.adapter) == ("/home/me/base", "/home/me/lora")
    assert config.data.train == (DataEntry(path="/home/me/rows.jsonl"),)
    assert config.data.eval == (DataEntry(path="a~/b"), DataEntry(path="/home/me/c"))
    assert config.data.chat_template == "/home/me/chat.jinja"


@pytest.mark.parametrize(
    ("value", "entries"),
    [
        ("a.jsonl", [DataEntry(path="a.jsonl")]),
        ("{path: a.jsonl, weight: 2}", [DataEntry(path="a.jsonl", weight=2.0)]),
        (
            "[a.jsonl, {path: b, limit: 3}]",
            [DataEntry(path="a.jsonl"), DataEntry(path="b", limit=3)],
        ),
    ],
)
def test_data_take_a_path_an_entry_or_a_list(
    toy: Path, value: str, entries: list[DataEntry]
) -> None:
    assert list(read("--data.train", value).data.train) == entries
    assert list(read("--data", value if value[0] != "{" else f"[{value}]").data.train) == entries


def test_all_problems_are_reported_at_once_with_path_and_near_match(toy: Path) -> None:
    words = ["--optm.lr", "1", "--optim.lrr", "1", "--optim.clip", "-1", "--learning-rate", "1"]
    words += ["--train.max-epochs", "2", "--train.steps", "2.7", "--toy.los", "x"]
    words += ["--toy.loss", "sigmiod", "--data.train", "[{pth: a}, {path: 3}]"]
    words += ["--train.beta", "1", "--zzz", "1", "--lora.rank", "0"]
    assert problems(*words) == [
        "optm: unknown setting; did you mean optim?",
        "'learning_rate' is optim.lr here",
        "zzz: unknown setting; available: model, data, batch, optim, train, rollouts, checkpoint, "
        "lora, backend, extensions, observers, output, toy, plain",
        "data.train.0.pth: unknown setting; did you mean data.train.0.path?",
        "data.train.0.path: is required",
        "data.train.1.path: expected text, got 3; quote it: '3' in YAML, \"'3'\" in a shell",
        "optim.lrr: unknown setting; did you mean optim.lr?",
        "optim.clip: must be >= 0: -1.0",
        "train.max_epochs: 'max_epochs' is train.epochs here",
        "train.beta: 'beta' is toy.beta here",
        "train.steps: expected a whole number, got 2.7",
        "lora.rank: must be > 0: 0",
        "toy.los: unknown setting; did you mean toy.loss?",
        'toy.loss: expected one of sigmoid, hinge, got "sigmiod"; did you mean sigmoid?',
    ]


def test_a_value_far_from_the_allowed_ones_gets_no_guess() -> None:
    @attrs.frozen
    class Section:
        reference: ReferenceMode

    assert structure({"reference": "none"}, Section) == (
        None, ['reference: expected one of auto, adapter, engine, cache, got "none"']
    )  # fmt: skip


def test_a_name_far_from_every_known_one_gets_no_guess(toy: Path) -> None:
    (message,) = problems("--dpo.beta", "1")
    assert message.startswith("dpo: unknown setting; available: model, data, batch, ")


def test_a_dotted_key_in_a_file_is_refused_with_its_nested_form(toy: Path, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("optim.lr: 1.0e-3\n")
    assert problems(str(file)) == ["optim.lr: unknown setting; in a file, write `optim: {lr: ...}`"]


def test_tokens_at_once_are_a_positive_number_or_auto(toy: Path) -> None:
    assert read("--batch.tokens", "auto").batch.tokens == "auto"
    assert read("--batch.tokens", "512").batch.budget == 512
    assert problems("--batch.tokens", "0") == ["batch.tokens: must be > 0: 0"]
    assert problems("--batch.tokens", "many") == [
        'batch.tokens: expected a whole number or auto, got "many"'
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("train.deterministic", "'false'", 'expected true or false, got "false"'),
        ("train.deterministic", "1", "expected true or false, got 1"),
        ("train.log_every", "true", "expected a whole number, got true"),
        ("train.log_every", "2.0", "expected a whole number, got 2.0"),
        ("train.log_every", "'2'", 'expected a whole number, got "2"'),
        ("train.epochs", "true", "expected a number, got true"),
        ("train.epochs", "0", "must be > 0: 0.0"),
        ("train.steps", "9" * 400, f"must be < {2**63}: {'9' * 400}"),
        ("train.hours", "soon", 'expected a number, got "soon"'),
        ("optim.lr", "true", "expected a number, got true"),
        ("optim.lr", ".nan", "expected a number, got NaN"),
        ("optim.lr", "null", "expected a number, got null"),
        ("optim.betas", "[0.9]", "expected a list of 2 values, got 1"),
        ("optim.betas", "0.9", "expected a list, got 0.9"),
        (
            "model.path",
            "2024-01-02",
            "expected text, got a date; quote it: '2024-01-02' in YAML, \"'2024-01-02'\" in a "
            "shell",
        ),
        ("lora.rank", "1.5", "expected a whole number, got 1.5"),
        ("plain.stage", "true", "expected one of auto, 0, 1, got true"),
        ("lora.targets", "{a: b}", 'expected text or a list, got {"a": "b"}'),
        ("data.train", "null", "expected a list, got null"),
        ("output", "[a]", 'expected text, got ["a"]'),
    ],
)
def test_values_of_a_wrong_type_are_refused_and_not_converted(
    toy: Path, name: str, value: str, message: str
) -> None:
    assert problems(f"--{name}", value) == [f"{name}: {message}"]


def test_a_rate_belongs_to_a_part_of_a_model_and_is_above_0(toy: Path) -> None:
    assert problems("--optim.part_lr", "{tower: 1e-5}") == [
        "optim.part_lr: 'tower' is not projector or vision"
    ]
    assert problems("--optim.part_lr", "{vision: 0}") == [
        "optim.part_lr: the rate of vision must be > 0: 0.0"
    ]


def test_settings_of_an_entry_are_refused_outside_of_it(toy: Path) -> None:
    assert problems("--data", "{path: a.jsonl, columns: {prompt: question}}", given=GIVEN[:2]) == [
        "data.path: unknown setting; it belongs in an entry of data.train",
        "data.columns: unknown setting; it belongs in an entry of data.train",
    ]


@frozen(kw_only=True)
class Underscored:
    """A section whose field is named by a word of Python."""

    removed_settings: ClassVar[Mapping[str, tuple[Any, ...]]] = {"lambda": (0.5,)}
    lambda_: float = field(default=1.0, validator=validators.ge(0))
    import_: tuple[int, ...] = field(default=(1,), validator=validators.min_len(1))


@frozen(kw_only=True)
class WithUnderscored:
    """A configuration with that section."""

    own: Underscored = field(factory=Underscored)


def test_a_setting_has_the_name_of_its_field_without_the_underscore() -> None:
    config, _ = structure({"own": 0.5}, WithUnderscored)
    assert config.own.lambda_ == 0.5
    assert merge(WithUnderscored, {"own": 0.5}) == {"own": {"lambda": 0.5}}
    assert without_removed(WithUnderscored, {"own": {"lambda": 0.5}}) == {"own": {}}
    assert structure({"own": {"lambda": -1.0, "import": []}}, WithUnderscored)[1] == [
        "own.lambda: must be >= 0: -1.0",
        "own.import: Length of 'import' must be >= 1: 0",
    ]
    assert structure({"own": {"lambda_": 1.0}}, WithUnderscored)[1] == [
        "own.lambda_: unknown setting; did you mean own.lambda?"
    ]


def test_a_number_may_be_text_and_a_list_of_text_one_word(toy: Path) -> None:
    config = read("--optim.lr", "1e-6", "--train.hours", "2", "--model.freeze", "*.embed*")
    assert (config.optim.lr, config.train.hours) == (1e-6, 2.0)
    assert isinstance(config.train.hours, float)
    assert config.model.freeze == ("*.embed*",)


def test_the_rate_of_lora_is_ten_times_the_trainers_unless_it_is_set(toy: Path) -> None:
    request = read_config("toy", overrides=[*GIVEN, "--lora", "16"])
    assert request.config.optim.lr == 1e-5
    assert request.notes == ("optim.lr is 1e-05 with LoRA: ten times the default of toy",)
    request = read_config("toy", overrides=[*GIVEN, "--lora", "16", "--optim.lr", "1e-6"])
    assert (request.config.optim.lr, request.notes) == (1e-6, ())


def test_without_model_and_data_the_demo_runs_with_the_users_settings(toy: Path) -> None:
    request = read_config("toy", overrides=["--model.dtype", "bf16", "--train.steps", "5"])
    assert request.demo
    assert str(request.origin) == "trainer 'toy' of rlhf-toy 1.0"
    config = request.config
    assert (config.model.path, config.model.dtype, config.train.steps) == ("tiny", "bf16", 5)
    assert (config.data.train[0].path, config.optim.lr) == ("toys.jsonl", 2e-3)
    assert not read_config("toy", overrides=GIVEN).demo


def test_the_data_of_a_demo_may_be_files_beside_it(toy: Path, install: Install) -> None:
    install("rlhf-sums", {"demos": {"arithmetic": "sums:plugin"}}, {"sums": "plugin = None"})
    (toy / "toys.jsonl").write_text("{}")
    (toy / "held.jsonl").write_text("{}")
    data = read_config("toy").config.data
    assert [entry.path for entry in data.train] == [str(toy / "toys.jsonl")]
    entries = "[{path: held.jsonl, limit: 2}, toys/toys, demo:arithmetic]"
    (toy / "toy.yaml").write_text(f"model: tiny\ndata: {{train: toys.jsonl, eval: {entries}}}\n")
    assert [(entry.path, entry.limit) for entry in read_config("toy").config.data.eval] == [
        (str(toy / "held.jsonl"), 2), ("toys/toys", None), ("demo:arithmetic", None)
    ]  # fmt: skip
    (toy / "toy.yaml").write_text("model: tiny\ndata: toys.jsonl\n")
    assert read_config("toy").config.data.train[0].path == str(toy / "toys.jsonl")


def test_one_of_model_and_data_is_an_error(toy: Path) -> None:
    assert problems(given=["--data", "rows.jsonl"]) == [
        "model.path is missing; pass --model FOLDER_OR_HUB_NAME"
    ]
    assert problems(given=["--model", "tiny"]) == [
        "data.train is missing; pass --data FILE_OR_HUB_NAME"
    ]
    words = ["--model.init", "random", "--data", "rows.jsonl"]
    assert read_config("toy", overrides=words).config.model.path == ""
    assert read_config("toy", inputs=False).config.model.path == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--model.quantize nf4", "model.quantize needs lora or model.adapter"),
        ("--model.adapter a --lora 8", "model.adapter continues an existing adapter; remove lora"),
        (
            "--model.adapter a --model.init random",
            "model.adapter cannot be combined with model.init random; remove one of the two",
        ),
        (
            "--model.quantize nf4 --lora 8 --model.init random",
            "model.quantize cannot be combined with model.init random; remove one of the two",
        ),
        (
            "--train.steps 5 --train.stop_at 6",
            "train.stop_at 6 is more than train.steps 5; lower it",
        ),
        ("--train.steps 5 --optim.warmup 6", "optim.warmup 6 is more than train.steps 5; lower it"),
        ("--optim.warmup 1.5", "optim.warmup must be below 1 or a whole number of steps"),
        (
            "--optim.schedule constant --optim.min_lr 0.1",
            "optim.min_lr has no effect with optim.schedule constant",
        ),
        (
            "--optim.name signs --optim.eps 0.1",
            "optim.eps has no effect with optim.name signs; remove it",
        ),
        (
            "--optim.name adamx",
            'optim.name: expected one of adamw, signs, got "adamx"; did you mean adamw?',
        ),
        (
            "--model.router_loss 0.01 --model.kernels compile",
            "model.router_loss cannot be combined with model.kernels compile; set it to 0",
        ),
        (
            "--model.router_loss 0.01 --model.fp8 rowwise",
            "model.router_loss cannot be combined with model.fp8; set it to 0",
        ),
        ("--train.eval_every 5", "train.eval_every needs data.eval"),
        ("--train.eval_at_start true", "train.eval_at_start needs data.eval"),
        ("--plain 1 --model.dtype fp16", "plain.stage 1 cannot be combined with model.dtype fp16"),
    ],
)
def test_conflicting_settings_are_refused(toy: Path, words: str, message: str) -> None:
    assert problems(*words.split()) == [message]


def test_a_file_that_is_not_a_configuration_is_refused_with_its_line(toy: Path) -> None:
    file = yaml_file(toy, "optim:\n  lr: 1\n  lr: 2\n")
    assert problems(file) == [f"{file} line 3: duplicate key 'lr'"]
    file = yaml_file(toy, "optim: {lr: 1\n")
    assert problems(file) == [f"{file} line 2: expected ',' or '}}', but got '<stream end>'"]
    file = yaml_file(toy, "- optim")
    assert problems(file) == [
        f"{file} contains a list; expected sections such as `optim: {{lr: 1e-5}}`"
    ]
    assert problems("gone.yaml") == ["cannot read gone.yaml: No such file or directory"]
    assert read(yaml_file(toy, "")).own.beta == 0.1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--overwrit"], "--overwrit needs a value; did you mean --overwrite?"),
        (["--lora"], "--lora needs a value; write --lora VALUE"),
        (["--nproc", "two"], "--nproc expects a number of processes, got 'two'"),
        (["--nproc"], "--nproc expects a number of processes"),
        (["--nproc", "0"], "--nproc expects a number of processes, got '0'"),
        (["--nproc=-1"], "--nproc expects a number of processes, got '-1'"),
        (["--nproc", "1.5"], "--nproc expects a number of processes, got '1.5'"),
        (["--nproc", "\N{SUPERSCRIPT TWO}"], "--nproc expects a number of processes, got '\xb2'"),
        (["--overwrite=no"], "--overwrite expects no value, got 'no'"),
        (["--resume=5"], "--resume expects step-N or no value, got '5'"),
        (["--resume", "step-x"], "--resume expects step-N or no value, got 'step-x'"),
        (
            ["--resume", "--overwrite"],
            "--resume continues a run and --overwrite replaces it; pass only one",
        ),
        (["--"], "'--' is not a setting; write --section.field VALUE"),
        (["--=1"], "'--=1' is not a setting; write --section.field VALUE"),
        (["--optim..lr", "1"], "'--optim..lr' is not a setting; write --section.field VALUE"),
        (["--optim.=1"], "'--optim.=1' is not a setting; write --section.field VALUE"),
        (["a.yaml", "b.yaml"], "unexpected argument 'b.yaml': the config file is already a.yaml"),
        (
            ["a.jsonl"],
            "'a.jsonl' is not a YAML file: its name must end with .yaml or .yml; pass "
            "data with --data, a model with --model",
        ),
        (
            ["--toy", "{a"],
            "--toy {a: the value is not valid YAML (expected ',' or '}', but got '<stream end>')",
        ),
    ],
)
def test_unexpected_command_line_arguments_are_refused(words: list[str], message: str) -> None:
    with pytest.raises(RLHFError) as caught:
        parse_words(words)
    assert str(caught.value) == message


FLAGS = ["--resume", "--nproc=2", "a.yaml", "--a-b.c-d", "-1", "--resume", "step-7"]


def test_the_flags_of_a_run_are_not_settings() -> None:
    words = parse_words(FLAGS)
    assert (words.nproc, words.resume, words.overwrite) == (2, "step-7", False)
    assert parse_words(["--overwrite"]).overwrite
    assert (words.source, words.overrides) == (Path("a.yaml"), (("a_b.c_d", -1),))
    assert parse_words(["--resume", "a.yaml"]).resume == ""
    assert parse_words(["--resume", "step-1.yaml"]).source == Path("step-1.yaml")
    assert parse_words([]).resume is None


def test_a_configuration_survives_its_tree_its_yaml_and_pickling(toy: Path) -> None:
    words = ["--lora", "8", "--lora.targets", "[q_proj, v_proj]", "--toy.loss", "hinge"]
    words += ["--data", "[a.jsonl, {path: b, columns: {prompt: question}}]", "--output", "'1'"]
    request = read_config("toy", overrides=[*GIVEN, *words])
    config = request.config
    file = yaml_file(toy, yaml.safe_dump(to_tree(config)))
    again = read_config("toy", overrides=[file]).config
    assert again == config
    assert changed_keys(yaml.safe_load(Path(file).read_text()), to_tree(config)) == {}
    assert pickle.loads(pickle.dumps(request)) == request


@pytest.mark.parametrize("words", [[], ["--lora", "8"], [*GIVEN, "--data.eval", "[a, b]"]])
def test_the_printed_configuration_reads_back_to_the_same(toy: Path, words: list[str]) -> None:
    config = read_config("toy", overrides=words, inputs=False).config
    text = describe(read_config("toy", overrides=words, inputs=False))
    assert read_config("toy", overrides=[yaml_file(toy, text)], inputs=False).config == config
    assert max(len(line) for line in text.splitlines() if "#" in line) <= 100


def test_the_printed_configuration_documents_each_field(toy: Path) -> None:
    text = describe(read_config("toy", overrides=["--lora.rank", "4"], inputs=False))
    assert "with LoRA: ten times the default of toy" in text
    assert (
        "\n# A toy workflow.\ntoy:\n  # Strength of the toy.\n  beta: 0.1\n"
        "  # Which loss, with a text that is long enough to be wrapped over two lines of comment "
        "when it is\n  # printed: really. (one of sigmoid, hinge)\n  loss: sigmoid\n"
    ) in text
    off = describe(read_config("toy", inputs=False))
    assert "\nlora: null\n  # Rank of the update.\n  # rank: 16\n" in off
    assert "An entry has path, subset, split, weight, limit, columns." in text


def test_every_field_of_core_is_documented() -> None:
    for section in attrs.fields(Config):
        cls = section_class(section.type) or Config
        for item in attrs.fields(cls) if cls is not Config else (section,):
            assert field_docs(cls).get(item.name), f"{section.name}.{item.name}"


def test_changed_keys_are_leaves() -> None:
    old = {"optim": {"lr": 1, "clip": 1}, "lora": None, "gone": 1, "train": [{"path": "a"}]}
    new = {"optim": {"lr": 2, "clip": 1}, "lora": {"rank": 8}, "train": [{"path": "b"}]}
    assert changed_keys(old, new) == {
        "optim.lr": (1, 2),
        "lora": (None, {"rank": 8}),
        "gone": (1, None),
        "train.0.path": ("a", "b"),
    }


def test_foreign_names_lead_to_settings_that_exist_and_are_not_settings_themselves() -> None:
    for name, ours in foreign_names().items():
        section, _, field = ours.partition(".")
        if hasattr(Config, section) and field:
            config: Any = Config()
            assert section == "lora" or hasattr(getattr(config, section), field), name
        assert not hasattr(Config, name), name


def test_a_trainer_and_a_backend_cannot_share_a_name() -> None:
    with pytest.raises(RLHFError) as caught:
        config_class("same", OptimConfig, "same", OptimConfig)
    assert str(caught.value) == (
        "trainer and backend are both called 'same'; choose another backend"
    )


def test_a_missing_required_field_is_an_error() -> None:
    _, message = structure({"data": {"train": {"weight": 1}}}, Config)
    assert message == ["data.train.0.path: is required"]
