"""On-policy methods: the examples that a trainer's `rollout` returns are laid out, packed, and
trained on or evaluated."""

from collections.abc import Sequence
from pathlib import Path

import attrs
import numpy as np
from attrs import define, field, frozen

from rlhf.contract.checks import Moment, after, call_of, check_rollout, naming
from rlhf.data.batch import PackedBatch
from rlhf.data.example import Example, num_tokens
from rlhf.data.layout import Rows
from rlhf.data.order import RunOrder, StepPlan
from rlhf.data.packing import divided
from rlhf.data.trees import TreeFile, to_table, tree, write
from rlhf.engine import Mesh
from rlhf.errors import RLHFError, SameOnAllRanks
from rlhf.launch.places import Marker
from rlhf.train.ahead import Ahead
from rlhf.trainer import Trainer

FILE = "rollout.arrow"
"""The examples in a checkpoint that is taken between two steps of the same rollout."""
DRAWN, HELD_OUT, SHUFFLED = range(3)
"""Streams of random numbers: seeds of rollouts in training and in evaluations, and the order of the
examples in later passes."""


@frozen
class Block:
    """The optimizer steps that one rollout serves. It never reaches into the next epoch, so a row
    is in it once."""

    epoch: int
    first: int
    """The optimizer step that draws."""
    batches: range
    """Numbers in the order of the data of the steps whose rows it has."""

    @classmethod
    def of(cls, step: int, order: RunOrder, trainer: Trainer) -> "Block":
        """Return the block of an optimizer step."""
        batches, passes = trainer.rollout_batches, trainer.rollout_passes
        per_epoch = order.steps_per_epoch
        epoch, place = divmod(step, per_epoch * passes)
        number, within = divmod(place, batches * passes)
        start = epoch * per_epoch + number * batches
        end = min(start + batches, (epoch + 1) * per_epoch)
        return cls(epoch, step - within, range(start, end))


@define
class Rollouts:
    """The steps of a training on examples that the trainer makes."""

    trainer: Trainer
    order: RunOrder
    mesh: Mesh
    place: Marker
    num_steps: int
    """Steps of the whole schedule."""
    ahead: Ahead
    """The answers of the next block, if they are drawn before the steps of this one."""
    _block: Block | None = field(default=None, init=False)
    _examples: Sequence[Example] = field(default=(), init=False)
    """The examples of the block, the same on every rank."""

    def step(self, number: int) -> tuple[StepPlan, list[PackedBatch]]:
        """Return the plan and this rank's micro-batches of an optimizer step. The first step of a
        block calls `Trainer.rollout`. Raises RLHFError for an example larger than the budget.
        Collective."""
        block = Block.of(number, self.order, self.trainer)
        by_batch = [self.order.rows(batch) for batch in block.batches]
        seed = self.order.config.train.seed
        rows = np.concatenate(by_batch)
        if block != self._block:
            self.place.enter("rollout", step=number + 1)
            self._draw_ahead(block)
            seeds = seeds_of(rows, seed, DRAWN, block.epoch)
            moment = Moment(f"step {number + 1}", self.order.examples)
            drawn = {*self.ahead.drawn}
            self._examples = self._roll_out(self.order, rows, number, seeds, moment)
            if drawn & self.ahead.drawn.keys():
                raise SameOnAllRanks(
                    f"{moment.when}: {call_of(self.trainer, 'draws')} returned other seeds than "
                    "rollout() passes to Run.sample; return the same"
                )
            self._block = block
        turn, part = divmod(number - block.first, len(by_batch))
        places = np.arange(len(rows))
        if turn:
            stream = [seed, SHUFFLED, block.first, turn]
            places = np.random.Generator(np.random.PCG64(stream)).permutation(len(rows))
        places = np.split(places, np.cumsum([len(batch) for batch in by_batch]))[part]
        chosen = [self._examples[int(place)] for place in places]
        return self.order.step_of(chosen, rows[places], number, passes=self.trainer.rollout_passes)

    def finish(self, step: int) -> None:
        """Wait for answers that are being written after `step` steps. Collective."""
        if self.ahead.writing:
            self.place.enter("rollout", step=step)
            self.ahead.finish()

    def save(self, folder: Path, step: int) -> list[Path]:
        """Write, after `finish`, what the steps after `step` still need; return the files."""
        files = self.ahead.save(folder)
        if self._block is None or self._block != Block.of(step, self.order, self.trainer):
            return files
        write(to_table([tree(example) for example in self._examples]), folder / FILE)
        return [*files, folder / FILE]

    def load(self, folder: Path, step: int) -> None:
        """Restore what `save` wrote after `step`."""
        self.ahead.load(folder)
        if (folder / FILE).exists():
            file = TreeFile(folder / FILE)
            self._examples = [file[number] for number in range(len(file))]
            self._block = Block.of(step, self.order, self.trainer)

    def held_out(
        self, order: RunOrder, number: int, *, step: int
    ) -> tuple[StepPlan, list[PackedBatch]]:
        """Return group `number` of the held-out rows in `order` after `step` steps, with the
        examples of `Trainer.rollout`: drawn with the same seeds in each evaluation. Collective."""
        rows = order.rows(number)
        seeds = seeds_of(rows, order.config.train.seed, HELD_OUT)
        examples = self._roll_out(order, rows, step, seeds, after(step, order.examples))
        return order.step_of(examples, rows, number)

    def _draw_ahead(self, block: Block) -> None:
        """With a lag, have the answers of the next block drawn before the steps of this one, and,
        where the schedule begins, first those of this one. Collective."""
        rollouts = self.order.config.rollouts
        if not rollouts.lag or rollouts.replay is not None:
            return  # Recorded answers are there at any time.
        self.ahead.finish()
        blocks = [] if self.ahead.drawn else [block]
        following = block.first + len(block.batches) * self.trainer.rollout_passes
        if following < self.num_steps:
            blocks.append(Block.of(following, self.order, self.trainer))
        for each in blocks:
            rows = np.concatenate([self.order.rows(batch) for batch in each.batches])
            seeds = seeds_of(rows, self.order.config.train.seed, DRAWN, each.epoch)
            moment = Moment(f"step {block.first + 1}", self.order.examples)
            with naming(call_of(self.trainer, "draws"), moment, rows):
                asked = self.trainer.draws(named(self.order, rows), seeds)
            self.ahead.begin(block.first, **asked)

    def _roll_out(
        self, order: RunOrder, rows: Rows, step: int, seeds: Sequence[int], moment: Moment
    ) -> Sequence[Example]:
        """Return the trainer's examples in place of `rows`. Raises RLHFError for one that is larger
        than the budget and cannot be divided. Collective."""
        given = named(order, rows)
        with naming(call_of(self.trainer, "rollout"), moment, rows):
            examples = self.trainer.rollout(given, step, seeds)
        check_rollout(examples, self.trainer, moment, rows.tolist(), self.mesh)
        budget = order.config.batch.budget
        # A survey returns one value for each example.
        whole = self.trainer.needs_survey()
        for row, example in zip(rows, examples, strict=True):
            parts = [example] if whole else divided(example, budget)
            size = max(map(num_tokens, parts))
            if size > budget:
                raise RLHFError(
                    f"with its new answer {order.examples.name(row)} has {size} tokens but "
                    f"batch.tokens is {budget}; set batch.tokens to at least {size}, or generate "
                    "fewer tokens"
                )
        return examples


def named(order: RunOrder, rows: Rows) -> list[Example]:
    """Return the examples of these rows with the names of their rows."""
    known = order.examples
    return [attrs.evolve(known[row], row=known.name(row)) for row in rows.tolist()]


def seeds_of(rows: Rows, *stream: int) -> list[int]:
    """Return a seed of 63 bits for each row, the same on every rank."""
    states = (np.random.SeedSequence([*stream, int(row)]).generate_state(1, "u8") for row in rows)
    return [int(state[0]) >> 1 for state in states]
