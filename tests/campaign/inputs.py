"""Damaged inputs, each drawn from a seed: bytes changed at random, and inputs that are crafted to be odd."""

import json
import random
from collections.abc import Iterator

ODD_JSON = ("[]", "null", '"text"', "{", '{"stages": 1}', "[" * 100_000, "\xff".encode("latin-1"))
"""What a file of JSON may hold that is no object, or no JSON at all."""

YAML_BOMB = "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""Eleven lines that stand for thirty thousand million values."""


def mutations(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies of a file, each damaged in another way: cut short, bytes changed, removed, repeated or set to extremes."""
    draw = random.Random(seed)
    for _ in range(count):
        changed = bytearray(content or b"\0")
        for _ in range(draw.choice((1, 1, 4, 32))):
            place = draw.randrange(max(1, len(changed)))
            length = min(draw.choice((1, 2, 4, 8)), len(changed) - place)
            kind = draw.randrange(5)
            if kind == 0:
                del changed[draw.randrange(1, len(changed) + 1) :]
            elif kind == 1:
                changed[place : place + length] = draw.randbytes(length)
            elif kind == 2:
                del changed[place : place + length]
            elif kind == 3:
                changed[place:place] = changed[place : place + 64]
            else:
                changed[place : place + length] = draw.choice((b"\0", b"\xff", b"\x7f")) * length
            if not changed:
                changed = bytearray(b"\0")
        yield bytes(changed)


def geojson(ring: list[list[float]]) -> str:
    """A file with one polygon."""
    return json.dumps({"type": "Polygon", "coordinates": [ring]})


def geojson_of_400_digits() -> str:
    """A polygon with a coordinate that is a whole number too large for a float."""
    return '{"type": "Polygon", "coordinates": [[[0, 0], [' + "9" * 400 + ", 0], [5, 5]]]}"


def scribble(corners: int, seed: int) -> list[list[float]]:
    """The outline of random points, whose sides cross each other about corners squared / 9 times."""
    draw = random.Random(seed)
    return [[draw.uniform(0, 1000), draw.uniform(0, 1000)] for _ in range(corners)]
