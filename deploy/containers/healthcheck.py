#!/usr/bin/python3 -I
"""Docker's health check: 0 as soon as one of the ports answers /live, at which roles do in these images.

moonpool-healthcheck [PORT ...]
"""

import sys
import urllib.error
import urllib.request

PORTS = ("8000", "8080", "8081")  # a front door's; those of --health in the Helm chart


def lives(port: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/live", timeout=3) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(0 if any(lives(port) for port in sys.argv[1:] or PORTS) else 1)
