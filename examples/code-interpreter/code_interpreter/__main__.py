"""``python3 -m code_interpreter [PORT]``: serves until it is ended."""

import sys

from aiohttp import web

from code_interpreter.server import PORT, serving

if __name__ == "__main__":
    web.run_app(serving(), port=int(sys.argv[1]) if len(sys.argv) > 1 else PORT, print=None)
