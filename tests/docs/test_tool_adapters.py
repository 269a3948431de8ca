"""The adapters of docs/tools.md, with clients that have the shape of those of OpenEnv and
verifiers."""

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from doc_blocks import FENCED
from rlhf_rollouts.rewards import Rewards, RewardSpec
from rlhf_rollouts.settings import Tools
from rlhf_rollouts.tools.calling import Calling
from rlhf_rollouts.tools.offer import offer
from rlhf_rollouts.tools.worker import Call, Result

PAGE = Path(__file__).parents[2] / "docs" / "tools.md"
OPENENV = """
from types import SimpleNamespace

WORDS = ["crane", "slate"]


class GenericEnvClient:
    def __init__(self, base_url):
        assert base_url.startswith("http")

    def sync(self):
        return self

    def reset(self, **options):
        self.word = WORDS[options["seed"]]
        observation = {"prompt": f" It begins with {self.word[0]}.", "messages": []}
        return SimpleNamespace(observation=observation, reward=None, done=False)

    def step(self, action):
        right = action["message"] == f"[{self.word}]"
        messages = [{"content": "yes" if right else "no"}]
        return SimpleNamespace(
            observation={"prompt": "", "messages": messages}, reward=float(right), done=right
        )
"""
VERIFIERS = """
State = dict


class Rubric:
    async def score_rollout(self, state):
        last = state["completion"][-1]["content"]
        state["reward"] = state.get("tries", 1) * float(last in (state["answer"], "yes"))


class Environment:
    rubric = Rubric()

    async def setup_state(self, state):
        state["tries"] = 0

    async def env_response(self, messages, state, **options):
        assert messages[0] == state["prompt"][0]
        state["tries"] += 1
        right = messages[-1]["content"] == state["answer"]
        return [{"role": "user", "content": "yes" if right else "no"}]


def load_environment(name):
    return Environment()
"""
ASKED = [{"role": "user", "content": "Guess."}]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both packages, in which processes of tools and rewards find them."""
    for name, source in (("openenv", OPENENV), ("verifiers", VERIFIERS)):
        (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def block(declared: str, folder: Path) -> str:
    """Write the block of the page that declares something, and return the file's path."""
    (code,) = (code for _, code in FENCED.findall(PAGE.read_text()) if declared in code)
    file = folder / "adapter.py"
    file.write_text(code)
    return str(file)


def episode(
    name: str, rows: Sequence[dict[str, object]], calls: Sequence[Call], folder: Path
) -> tuple[list[str | None], list[Result], list[float | None]]:
    """Return the texts with which an environment of the page begins, the results of calls and the
    rewards."""
    settings = Tools(environment=f"{block(f'class {name}:', folder)}:{name}")
    offered = offer(settings)
    assert offered.rewards
    assert offered.methods == {call.name for call in calls}
    calling = Calling(
        settings, workers=1, environment=offered.environment, asynchronous=offered.asynchronous
    )
    try:
        return calling.reset(rows), calling.results(calls), calling.rewards(len(rows))
    finally:
        calling.close()


def test_a_client_of_openenv_is_an_environment(place: Path) -> None:
    calls = [
        Call(answer, "guess", {"word": word}, of_environment=True)
        for answer, word in ((0, "slate"), (0, "crane"), (1, "crane"), (0, "crane"))
    ]
    texts, results, rewards = episode("Wordle", [{"seed": 0}, {"seed": 1}], calls, place)
    assert texts == [" It begins with c.", " It begins with s."]
    assert [result.value for result in results] == ["no", "yes", "no", None]
    assert results[-1].text == "the game is over"
    assert rewards == [1.0, 0.0]


def test_a_multi_turn_environment_of_verifiers_is_an_environment(place: Path) -> None:
    rows = [{"prompt": ASKED, "answer": "4"}, {"prompt": ASKED, "answer": "5"}]
    calls = [
        Call(answer, "act", {"text": text}, of_environment=True)
        for answer, text in ((0, "3"), (0, "4"), (1, "4"))
    ]
    texts, results, rewards = episode("Episode", rows, calls, place)
    assert texts == [None, None]
    assert [result.value for result in results] == ["no", "yes", "no"]
    assert rewards == [2.0, 0.0]


def test_a_rubric_of_verifiers_is_a_reward(place: Path) -> None:
    rewards = Rewards([RewardSpec(function=f"{block('rubric = vf.', place)}:score")])
    try:
        scores = rewards(
            completions=[[{"role": "assistant", "content": text}] for text in ("4", "5")],
            prompts=[ASKED, ASKED], completion_ids=[[1], [2]], columns={"answer": ["4", "4"]},
            trainer_state={"global_step": 0},
        )  # fmt: skip
    finally:
        rewards.close()
    assert scores.total.tolist() == [1.0, 0.0]
