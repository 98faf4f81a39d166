"""Build the documentation site: ``python -m docs.site [--serve] [FOLDER]``, by default into build/docs.

A warning is an error: a broken link or anchor, a page that is in no table of contents, an image that is missing.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from sphinx.cmd.build import build_main

DOCS = Path(__file__).parents[1]
OUTPUT = DOCS.parent / "build" / "docs"
PORT = 8000


def build(output: Path, *options: str, pages: Path = DOCS) -> int:
    """Return Sphinx's exit code: 0 if the site is complete and nothing in it is broken. Every page is built anew:
    otherwise Sphinx would not repeat the warnings of unchanged pages, nor notice that the code changed."""
    strict = ("--fail-on-warning", "--quiet", "--no-color", "--fresh-env")
    with TemporaryDirectory() as parsed:
        folders = ("--conf-dir", str(DOCS / "site"), "--doctree-dir", parsed, str(pages), str(output))
        return build_main([*strict, *options, *folders])


def serve(folder: Path) -> None:
    handler = partial(SimpleHTTPRequestHandler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", PORT), handler) as server:
        sys.stdout.write(f"http://127.0.0.1:{PORT}/ (Ctrl-C ends it)\n")
        server.serve_forever()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.site", description="Build the documentation site.")
    parser.add_argument("folder", nargs="?", type=Path, default=OUTPUT, help="default: build/docs")
    parser.add_argument("--serve", action="store_true", help=f"then serve it on 127.0.0.1:{PORT}")
    arguments = parser.parse_args()
    code = build(arguments.folder)
    if code == 0 and arguments.serve:
        try:
            serve(arguments.folder)
        except KeyboardInterrupt:
            return 130
    if code == 0:
        sys.stdout.write(f"{arguments.folder / 'index.html'}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
