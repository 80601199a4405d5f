"""`python -m tests.campaign.guided KIND --seconds 20 --seed 1`: bytes that a reader trips over, found by Atheris.

Its libFuzzer keeps the bytes that reach new lines of its2clr and changes those further. `make campaign` installs it;
without it this is left out, and the campaign says so.
"""

import argparse
import importlib.util
import re
import sys
import tempfile
from pathlib import Path

KINDS = (
    "annotations, GeoJSON", "annotations, XML", "manifest", "recipe", "search space", "JSON", "checkpoint",
    "weights, safetensors", "features of TRIDENT",
)  # fmt: skip
"""Kinds whose readers are Python of ours for the most part, and that need no finished run."""
RUNS = re.compile(r"stat::number_of_executed_units:\s*(\d+)")


def installed() -> bool:
    """Whether Atheris is there."""
    return importlib.util.find_spec("atheris") is not None


def words(kind: str, seconds: float, seed: int) -> list[str]:
    """The command."""
    return [sys.executable, "-m", "tests.campaign.guided", kind, "--seconds", f"{seconds:.0f}", "--seed", str(seed)]


def main() -> None:
    """Fuzz one kind; ends with libFuzzer's exit code, which is 0 if nothing was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    import atheris

    with atheris.instrument_imports(include=["its2clr"]):
        from tests.campaign.kinds import kinds
    kind = kinds()[options.kind]
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "files" / kind.file
        path.parent.mkdir()
        kind.make(path)
        corpus = Path(place) / "corpus"
        corpus.mkdir()
        whole = path.read_bytes()
        (corpus / "whole").write_bytes(whole)

        def read(content: bytes) -> None:
            path.write_bytes(content)
            try:
                kind.read(path)
            except kind.error:
                return

        words = [
            f"-max_total_time={options.seconds}", f"-seed={options.seed % 2**31}", "-timeout=60", "-rss_limit_mb=4000",
            f"-max_len={4 * len(whole)}", f"-artifact_prefix={place}/", "-print_final_stats=1",
        ]  # fmt: skip
        atheris.Setup([sys.argv[0], *words, str(corpus)], read)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
