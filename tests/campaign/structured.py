"""Inputs that keep their form and lose their sense, drawn and shrunk by Hypothesis.

Random bytes seldom get past a parser. Here a file of JSON, YAML or comma separated values is read, a value of it is
replaced by an odd one, removed or repeated, a few times, and it is written again in the same form.
"""

import copy
import csv
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import yaml
from hypothesis import strategies as st

EXTREMES = (
    10**400,
    2**63,
    2**31,
    -1,
    0,
    1e308,
    5e-324,
    float("inf"),
    float("nan"),
    "",
    "\0",
    "../..",
    "/",
    "\u202e",
    "=1+1",
)
"""Values that programs forget."""
TEXT = st.text(max_size=12)
SINGLE = st.sampled_from(EXTREMES) | st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(
    SINGLE, lambda part: st.lists(part, max_size=4) | st.dictionaries(TEXT, part, max_size=4), max_leaves=8
)
CELLS = SINGLE.map(str)


def changed(name: str, whole: bytes) -> st.SearchStrategy[bytes]:
    """Files like a whole one, with odd values in it.

    Args:
        name: The file's name; its ending says the form.
        whole: What a whole one holds.
    """
    read, write, values = FORMS[name.rpartition(".")[2]]
    return _changed(read(whole.decode()), values).map(lambda document: write(document).encode(errors="surrogatepass"))


@st.composite
def _changed(draw: st.DrawFn, document: Any, values: st.SearchStrategy[Any]) -> Any:
    found = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(found))
        if not places:
            return draw(values)
        parent, key = draw(st.sampled_from(places))
        how = draw(st.sampled_from(("replace", "replace", "remove", "repeat")))
        if how == "replace":
            parent[key] = draw(values)
        elif how == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        else:
            parent[draw(TEXT)] = copy.deepcopy(parent[key])
    return found


def _places(document: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a document with every key in it."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield document, key
            yield from _places(value)


def _table(text: str) -> list[list[str]]:
    return list(csv.reader(io.StringIO(text)))


def _table_text(rows: Any) -> str:
    written = io.StringIO()
    whole = rows if isinstance(rows, list) else [rows]
    csv.writer(written).writerows([row if isinstance(row, list) else [row] for row in whole])
    return written.getvalue()


def _yaml(document: Any) -> str:
    return str(yaml.safe_dump(document, allow_unicode=True))


FORMS: dict[str, tuple[Callable[[str], Any], Callable[[Any], str], st.SearchStrategy[Any]]] = {
    "json": (json.loads, json.dumps, VALUES),
    "geojson": (json.loads, json.dumps, VALUES),
    "yaml": (yaml.safe_load, _yaml, VALUES),
    "csv": (_table, _table_text, CELLS),
}
"""How a form is read and written, and what may stand in it."""


def feed(name: str, whole: bytes, count: int, seed: int, read: Callable[[bytes], None]) -> None:
    """Give a reader changed files; what it must not raise is shrunk to the smallest file that raises it."""

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=count, database=None, deadline=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(changed(name, whole))
    def every(content: bytes) -> None:
        read(content)

    every()
