"""Health check of the images: what /health says, where MEGAPONDER_HEALTH_PORT names the run's Prometheus port."""

import os
import sys
import urllib.error
import urllib.request

port = os.environ.get("MEGAPONDER_HEALTH_PORT")
if port:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
            print(answer.read().decode())
    except (urllib.error.URLError, OSError) as error:
        sys.exit(f"no health at port {port}: {error}")
