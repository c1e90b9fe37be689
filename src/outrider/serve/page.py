"""The chat page at `/`: one file, with a policy that lets it run its own scripts and talk to this server, no more."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files


def page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers. What a model makes it show can run nothing: scripts and styles are allowed by hash.

    It holds no secret; where the server has API keys, the browser asks for one before it gets the page.
    """
    html = (files("outrider.serve") / "page.html").read_text("utf-8")

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        return " ".join(f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'" for text in found)

    policy = {
        "default-src": "'none'",
        "script-src": hashes("script"),
        "style-src": hashes("style"),
        "img-src": "data:",
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
