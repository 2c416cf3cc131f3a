"""Where the repository is, and the folder with the paper's golden numbers next to it."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared"
