"""The preset pythia-14m from an empty cache to its page, through `make` and a hub on this machine.

    python -m tests.hub_walk [FOLDER]

The checkpoint has the published shape and random weights, the tokenizer is Pythia's, the posts and
comparisons are a few dozen rows of ../shared/tldr-human. Then the hub is closed, and a second run
goes the same way with HF_HUB_OFFLINE=1: it must end with the same numbers. They show that the way
is open, and nothing else. Some minutes on one core.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests import hub_repositories as layouts
from tests.hub_server import serving

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
SETTINGS = """
    sft.batch_size=16 rm.batch_size=16 ppo.batch_size=8 ppo.total_episodes=16
    eval.posts=8 judge.kind=reward_model checks.control_posts=4 data.max_query_tokens=128
    memory.mixed_precision=no memory.microbatch_size=4 memory.forward_batch_size=8
    memory.cpu_threads=1
""".split()
GOALS = ("sft", "rm", "ppo", "eval")
LONGEST = 40  # words of a summary; longer ones would need data.max_summary_tokens
POSTS, HELD_OUT_POSTS, PAIRS, HELD_OUT_PAIRS = 32, 8, 32, 16
STAGES = ("base", "sft", "rm", "normalize", "ppo", "summaries")


def short_rows(name: str, count: int) -> list[dict[str, Any]]:
    """The first rows of a shared file whose summaries are neither empty nor long."""
    found: list[dict[str, Any]] = []
    with (SHARED / "tldr-human" / f"{name}.jsonl").open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            texts = [one["text"] for one in row.get("summaries", ())] or [row["summary"]]
            if all(0 < len(text.split()) < LONGEST for text in texts):
                found.append(row)
            if len(found) == count:
                break
    return found


def make(folder: Path, name: str, **environment: str) -> None:
    """Make everything, with runs below the folder; say how long it took. Raises where it fails."""
    asked = ["PRESET=pythia-14m", f"NAME={name}", f"SET={' '.join(SETTINGS)}"]
    here = [
        "--no-print-directory",
        "-f",
        str(ROOT / "Makefile"),
        "VENV=",
        f"PYTHON={sys.executable}",
    ]
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    own = {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home")}
    before = [f"{key}={value}" for key, value in environment.items()]
    print("\n$", *before, "make", *GOALS, *asked[:2], flush=True)
    started = time.monotonic()
    command = ["make", *here, *GOALS, *asked]
    subprocess.run(command, cwd=folder, env=inherited | own | environment, check=True)
    print(f"-- {time.monotonic() - started:.0f} s", flush=True)


def contents(folder: Path, name: str) -> dict[str, str]:
    """The hash of what each stage put out."""
    run = folder / "runs" / name / "seed44413"
    manifests = {stage: (run / stage / "manifest.json").read_text() for stage in STAGES}
    return {stage: json.loads(text)["content"] for stage, text in manifests.items()}


def main(argv: list[str] | None = None) -> None:
    """Walk it twice; the pages stay in FOLDER. Exits with 1 if the two runs differ."""
    arguments = sys.argv[1:] if argv is None else argv
    folder = Path(arguments[0] if arguments else tempfile.mkdtemp(prefix="hub-walk-"))
    if not SHARED.is_dir():
        raise SystemExit(f"error: {SHARED} with posts and tokenizer is not here")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"walking in {folder}")
    with serving() as hub:
        held_out = short_rows("sft_validation", HELD_OUT_POSTS)
        layouts.add_posts(hub, short_rows("sft_train", POSTS), held_out, held_out[:2])
        pairs = short_rows("comparisons_train", PAIRS)
        layouts.add_comparisons(hub, pairs, short_rows("comparisons_validation", HELD_OUT_PAIRS))
        tokenizer = layouts.neox_tokenizer(SHARED / "tokenizer")
        layouts.add_pythia(hub, tokenizer, layouts.pythia_files())
        make(folder, "hub-walk", HF_ENDPOINT=hub.url)
        print(f"the hub was asked {len(hub.requests)} times")
    make(folder, "hub-walk-offline", HF_HUB_OFFLINE="1")
    same = contents(folder, "hub-walk") == contents(folder, "hub-walk-offline")
    print("every stage put out the same" if same else "the two runs differ")
    raise SystemExit(not same)


if __name__ == "__main__":
    main()
