"""Questions about small images of coloured shapes and digits, drawn by rule with Pillow."""

import base64
import hashlib
import io
import random
from collections.abc import Callable, Iterator, Sequence

from attrs import frozen
from PIL import Image, ImageDraw

CELL = 28
"""Pixels of a side of one cell of an image. Each thing lies in a cell of its own."""
COLORS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 200, 30),
    "purple": (150, 60, 190),
    "black": (25, 25, 25),
}
SHAPES = ("circle", "square", "triangle", "diamond")
DIGITS = tuple("0123456789")
BACKGROUNDS = ((255, 255, 255), (236, 236, 236), (214, 226, 236), (238, 228, 212))
SEGMENTS = (
    "abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg",
)  # fmt: skip
"""The strokes of each digit, named as those of seven-segment displays."""
STROKES = {
    "a": (0, 0, 10, 2), "b": (8, 0, 10, 10), "c": (8, 8, 10, 18), "d": (0, 16, 10, 18),
    "e": (0, 8, 2, 18), "f": (0, 0, 2, 10), "g": (0, 8, 10, 10),
}  # fmt: skip
"""Where a stroke lies in a digit of 11 x 19 pixels: left, top, right, bottom."""
SIZES = {"train": 4000, "eval": 200}
EVAL_SHARE = 20
"""One question in so many is held out, by a hash of its images: no image is on both sides."""


@frozen
class Thing:
    """A coloured shape or digit in one cell of an image."""

    name: str
    """One of SHAPES, or a digit."""
    color: str
    column: int
    row: int
    shift: tuple[int, int]
    """Pixels from the middle of the cell, to the right and down."""
    radius: int
    """Pixels from a shape's middle to its edge."""


@frozen
class Scene:
    """What an image shows."""

    columns: int
    rows: int
    background: tuple[int, int, int]
    things: tuple[Thing, ...]
    """In the order in which one reads: from left to right, row after row."""

    @property
    def caption(self) -> str:
        return ", ".join(f"{thing.color} {thing.name}" for thing in self.things) + "."


@frozen
class Question:
    """A question about one or two images, its answer and the wrong answers of the same form."""

    kind: str
    """One of KINDS."""
    scenes: tuple[Scene, ...]
    text: str
    answer: str
    wrong: tuple[str, ...]


def questions(split: str) -> Iterator[Question]:
    """Yield the questions of `train` or `eval`, always the same in the same order; the kinds take
    turns."""
    draw, kinds = random.Random(f"shapes {split}"), tuple(KINDS)
    for number in range(SIZES[split]):
        yield question(kinds[number % len(kinds)], draw, held_out=split == "eval")


def question(kind: str, draw: random.Random, *, held_out: bool = False) -> Question:
    """Return a new question of one of KINDS."""
    while True:
        scenes, text, sentence, values, right = KINDS[kind](draw)
        if is_held_out(scenes) == held_out:
            wrong = tuple(sentence.format(value) for value in values if value != right)
            return Question(kind, scenes, text, sentence.format(right), wrong)


def is_held_out(scenes: Sequence[Scene]) -> bool:
    """Return whether questions about these images belong to `eval`."""
    return hashlib.sha256(repr(scenes).encode()).digest()[0] % EVAL_SHARE == 0


def image(scene: Scene) -> Image.Image:
    """Draw a scene as an RGB image of 56 x 56 to 112 x 84 pixels."""
    drawn = Image.new("RGB", (scene.columns * CELL, scene.rows * CELL), scene.background)
    pencil = ImageDraw.Draw(drawn)
    for thing in scene.things:
        x = thing.column * CELL + CELL // 2 + thing.shift[0]
        y = thing.row * CELL + CELL // 2 + thing.shift[1]
        _draw(pencil, thing, x, y)
    return drawn


def data_url(scene: Scene) -> str:
    """Return the image of a scene as the data URL of a PNG file."""
    file = io.BytesIO()
    image(scene).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def scene(
    draw: random.Random, wanted: Sequence[tuple[str, str]], others: Sequence[str] = SHAPES
) -> Scene:
    """Return a scene of the wanted things, (name, color), and up to two of `others`, whose names
    and colors differ from theirs."""
    columns, rows = draw.randint(2, 4), draw.randint(2, 3)
    names = [name for name in others if name not in {name for name, _ in wanted}]
    colors = [color for color in COLORS if color not in {color for _, color in wanted}]
    room = min(2, columns * rows - len(wanted))
    added = [(draw.choice(names), draw.choice(colors)) for _ in range(draw.randint(0, room))]
    cells = draw.sample(range(columns * rows), len(wanted) + len(added))
    things = [
        Thing(name, color, cell % columns, cell // columns, _shift(draw), draw.randint(8, 10))
        for (name, color), cell in zip([*wanted, *added], cells, strict=True)
    ]
    things.sort(key=lambda thing: (thing.row, thing.column))
    return Scene(columns, rows, draw.choice(BACKGROUNDS), tuple(things))


Parts = tuple[tuple[Scene, ...], str, str, Sequence[str], str]
"""The scenes, the question, the sentence of an answer, the values that fit into it, and the right
one."""


def _color(draw: random.Random) -> Parts:
    name, color = _shape_and_color(draw)
    shown = scene(draw, [(name, color)], DIGITS)
    return (shown,), f"What color is the {name}?", "It is {}.", tuple(COLORS), color


def _shape(draw: random.Random) -> Parts:
    name, color = _shape_and_color(draw)
    shown = scene(draw, [(name, color)], DIGITS)
    return (shown,), f"Which shape is {color}?", "It is a {}.", SHAPES, name


def _digit(draw: random.Random) -> Parts:
    digit = draw.choice(DIGITS)
    shown = scene(draw, [(digit, draw.choice([*COLORS]))])
    return (shown,), "Which digit is shown?", "It is {}.", DIGITS, digit


def _count(draw: random.Random) -> Parts:
    number = draw.randint(1, 4)
    shown = scene(draw, [_shape_and_color(draw) for _ in range(number)], DIGITS)
    return (shown,), "How many shapes are there?", "I count {}.", tuple("1234"), str(number)


def _position(draw: random.Random) -> Parts:
    name, color = _shape_and_color(draw)
    while True:
        shown = scene(draw, [(name, color)], DIGITS)
        thing = next(thing for thing in shown.things if thing.name == name)
        axes = [
            (2 * thing.column + 1 - shown.columns, ("on the left", "on the right")),
            (2 * thing.row + 1 - shown.rows, ("at the top", "at the bottom")),
        ]
        # A thing in the middle is on neither side.
        if sides := [axis for axis in axes if axis[0]]:
            place, values = draw.choice(sides)
            text = f"Is the {name} {values[0]} or {values[1]}?"
            return (shown,), text, "It is {}.", values, values[place > 0]


def _which_image(draw: random.Random) -> Parts:
    with_it = scene(draw, [(draw.choice(DIGITS), draw.choice([*COLORS]))])
    scenes = [scene(draw, [_shape_and_color(draw)])]
    right = draw.randrange(2)
    scenes.insert(right, with_it)
    text, values = "Is the digit in the first or in the second image?", ("first", "second")
    return tuple(scenes), text, "It is in the {}.", values, values[right]


def _shape_and_color(draw: random.Random) -> tuple[str, str]:
    return draw.choice(SHAPES), draw.choice([*COLORS])


KINDS: dict[str, Callable[[random.Random], Parts]] = {
    "color": _color,
    "shape": _shape,
    "digit": _digit,
    "count": _count,
    "position": _position,
    "image": _which_image,
}
"""What makes questions, by their kind."""


def _shift(draw: random.Random) -> tuple[int, int]:
    return draw.randint(-2, 2), draw.randint(-2, 2)


def _draw(pencil: ImageDraw.ImageDraw, thing: Thing, x: int, y: int) -> None:
    """Draw a thing whose middle is the pixel (x, y)."""
    color, r = COLORS[thing.color], thing.radius
    if thing.name == "circle":
        pencil.ellipse((x - r, y - r, x + r, y + r), fill=color)
    elif thing.name == "square":
        pencil.rectangle((x - r, y - r, x + r, y + r), fill=color)
    elif thing.name == "triangle":
        pencil.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=color)
    elif thing.name == "diamond":
        pencil.polygon(((x, y - r), (x - r, y), (x, y + r), (x + r, y)), fill=color)
    else:
        for segment in SEGMENTS[int(thing.name)]:
            left, top, right, bottom = STROKES[segment]
            pencil.rectangle((x - 5 + left, y - 9 + top, x - 5 + right, y - 9 + bottom), fill=color)
