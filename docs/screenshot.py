"""Writes a picture of a run's page: `python -m docs.screenshot SERVER RUN -o docs/images/x.png`.

The picture in the README is made by this from a demo that is still serving. Needs the development
packages and a Chromium.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from urllib.parse import quote

from PIL import Image

from tests.support.servers.browser import save_screenshot


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server", help="address, for example http://127.0.0.1:8642")
    parser.add_argument("run", help="run id")
    parser.add_argument("-o", "--output", type=Path, required=True, help="PNG file to write")
    parser.add_argument("--width", type=int, default=1400)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--whole", action="store_true", help="down to the end of the page")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    try:
        save_screenshot(
            options.server,
            f"/runs/{quote(options.run, safe='')}",
            str(options.output),
            width=options.width,
            height=options.height,
            scheme=options.theme,
            whole_page=options.whole,
        )
    except FileNotFoundError as missing:
        parser.exit(2, f"{missing}\n")
    shrink(options.output)
    return 0


def shrink(path: Path) -> None:
    """Gives a picture a palette of 256 colours: 90 KB instead of 240, and nobody sees it."""
    with Image.open(path) as picture:
        reduced = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
