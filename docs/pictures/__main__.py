"""`python -m docs.pictures`: the pictures of the docs, taken anew. Nothing of this is installed."""

from __future__ import annotations

import argparse
from importlib import import_module
from pathlib import Path

NAMES = ("page", "film", "report", "gallery", "hybrids", "windows")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.pictures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(NAMES)} (all)")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    if unknown := set(args.names) - set(NAMES):
        parser.error(f"{', '.join(unknown)}: there are {', '.join(NAMES)}")
    for name in args.names or NAMES:
        import_module(f"docs.pictures.{name}").take(args.folder)


if __name__ == "__main__":
    main()
