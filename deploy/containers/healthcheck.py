#!/usr/bin/python3 -I
"""Health check of the images: exits with 0 if one of the ports answers /live.

moonpool-healthcheck [PORT ...]
"""

import ssl
import sys
import urllib.error
import urllib.request

PORTS = ("8000", "8080", "8081")  # the API server's, and those of --health in the Helm chart


def lives(url: str) -> bool:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # The certificate need not be valid for this address: only the answer matters.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with urllib.request.urlopen(f"{url}/live", timeout=3, context=context) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, ValueError):
        return False


if __name__ == "__main__":
    ports = sys.argv[1:] or PORTS
    sys.exit(0 if any(lives(f"{scheme}://127.0.0.1:{port}") for port in ports for scheme in ("http", "https")) else 1)
