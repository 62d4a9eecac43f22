"""The files of the page: what the plugin serves and a report holds."""

from pathlib import Path

PAGE = Path(__file__).parent / "page"

SCRIPTS = (
    "decode.js",
    "dom.js",
    "colours.js",
    "colormaps.js",
    "numbers.js",
    "paint.js",
    "data.js",
    "state.js",
    "controls.js",
    "lazy.js",
    "help.js",
    "steps.js",
    "curves.js",
    "closeup.js",
    "classes.js",
    "images.js",
    "compare.js",
    "app.js",
)
"""Each after those that it imports."""

PAGE_FILES = {
    **dict.fromkeys(SCRIPTS, "text/javascript"),
    "entry.js": "text/javascript",
    "style.css": "text/css",
}
"""Every file with its type."""
