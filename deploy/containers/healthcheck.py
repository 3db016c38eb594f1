#!/usr/bin/python3 -I
"""Docker's health check: 0 as soon as one of the ports answers /live, at which roles do in these images.

moonpool-healthcheck [PORT ...]
"""

import ssl
import sys
import urllib.error
import urllib.request

PORTS = ("8000", "8080", "8081")  # a front door's; those of --health in the Helm chart


def lives(url: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Whether a process of this container answers: its certificate is for clients to check.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/live", timeout=3, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


if __name__ == "__main__":
    ports = sys.argv[1:] or PORTS
    sys.exit(0 if any(lives(f"{scheme}://127.0.0.1:{port}") for port in ports for scheme in ("http", "https")) else 1)
