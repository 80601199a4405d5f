"""How many small changes of the method's source its tests notice: a random share of mutmut's mutants, by module.

    python tests/mutation.py [--share 0.1] [--seed 0] [--out mutation.json]

Takes hours at --share 1: every mutant runs the tests that reach it.
"""

import argparse
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

KILLED, SURVIVED, NO_TESTS = "killed", "survived", "no tests"
NAMES = {0: SURVIVED, 1: KILLED, 3: KILLED, 5: NO_TESTS, 33: NO_TESTS, -24: KILLED, 24: KILLED, 36: KILLED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("mutation.json"))
    args = parser.parse_args()
    mutmut = [str(Path(sys.executable).with_name("mutmut"))]
    subprocess.run([*mutmut, "run", "--max-children", "1", "its2clr.pretrain.simclr.x_simclr__mutmut_1"], check=False)
    names = sorted(found())
    chosen = sorted(random.Random(args.seed).sample(names, round(args.share * len(names))))
    print(f"{len(chosen)} of {len(names)} mutants", flush=True)
    subprocess.run([*mutmut, "run", *chosen], check=False)
    outcome = {name: NAMES.get(code, "other") for name, code in found().items() if name in set(chosen)}
    by_module: dict[str, Counter[str]] = {}
    for name, what in outcome.items():
        by_module.setdefault(name.rpartition(".x")[0].rpartition("ǁ")[0] or name.rpartition(".")[0], Counter())[
            what
        ] += 1
    for module, counts in sorted(by_module.items()):
        print(f"{module}: {counts[KILLED]} of {counts.total()}")
    total = sum((counts for counts in by_module.values()), Counter())
    print(f"all: {total[KILLED]} of {total.total()} ({total[KILLED] / total.total():.0%}); {dict(total)}")
    survivors = sorted(name for name, what in outcome.items() if what != KILLED)
    args.out.write_text(json.dumps({"outcome": dict(total), "survivors": survivors}, indent=1) + "\n")


def found() -> dict[str, int | None]:
    """Every mutant, with how its tests ended."""
    codes: dict[str, int | None] = {}
    for path in Path("mutants/src").rglob("*.meta"):
        codes |= json.loads(path.read_text())["exit_code_by_key"]
    return codes


if __name__ == "__main__":
    main()
