"""Make docs/results.md from a folder of `its2clr reproduce all`: its page with the pictures beside it.

    its2clr reproduce all --budget quick --seeds 3 --workers 15 --out quick
    python benchmarks/results_page.py quick docs

What the page says before the tables is docs/results/lead.md, written by hand.
"""

import json
import re
import shutil
import sys
from pathlib import Path

MOST_ROWS = 1000


def main(results: Path, docs: Path) -> None:
    """Write the page, its pictures and its numbers.

    Args:
        results: Folder of `its2clr reproduce`.
        docs: Folder of the documentation.
    """
    folder = docs / "results"
    page = (results / "results.md").read_text(encoding="utf-8")
    for link in sorted(set(re.findall(r"\(([\w.-]+)/plot\.png\)", page))):
        shutil.copyfile(results / link / "plot.png", folder / f"{link}.png")
        numbers = json.loads((results / link / "result.json").read_text(encoding="utf-8"))
        if len(numbers["rows"]) <= MOST_ROWS:  # a row per instance says no more than its picture
            (folder / f"{link}.json").write_text(json.dumps(numbers) + "\n", encoding="utf-8")
        page = page.replace(f"({link}/plot.png)", f"(results/{link}.png)")
    title, _, rest = page.partition("\n")
    lead = (folder / "lead.md").read_text(encoding="utf-8").strip()
    (docs / "results.md").write_text(f"{title}\n\n{lead}\n\n## How to read this\n{rest}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
