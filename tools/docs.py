"""python -m tools.docs: the documentation as a site, in build/docs/. Needs no network; a warning is an error. Extra `docs`."""

import argparse
import sys
from pathlib import Path

from tools.pythons import ROOT


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tools.docs", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="where the pages go (default: build/docs/)")
    given = parser.parse_args(argv)
    from sphinx.cmd.build import main as sphinx

    code = sphinx(["-q", "-W", "--keep-going", "-b", "html", "-d", f"{given.out}.doctrees", str(ROOT / "docs"), str(given.out)])
    if code == 0:
        print(f"open {given.out / 'index.html'}")
    return code


if __name__ == "__main__":
    sys.exit(main())
