"""Makes HTML pages of one file that work from disk, without network: template, data, styles and scripts in one.

Text from compilers may contain anything. So templates escape by default, the JSON has no `<`, `>` or `&`, scripts set text and
never markup, and the page's policy forbids other scripts and all fetches. Equal values give equal bytes.
"""

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

TEMPLATES = Path(__file__).parent / "templates"


def render_page(template: str, data: object, styles: Sequence[str], scripts: Sequence[str], **values: object) -> str:
    """The page. template: extends page.html. data: for the scripts. styles, scripts: files of `templates/`, in order, after
    page.css.
    """
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True,
                                     lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters["count"] = lambda n: f"{n:,}" if isinstance(n, int) else "–"
    script, style = ("\n".join(map(source, names)) for names in (scripts, ["page.css", *styles]))
    return environment.get_template(template).render(
        data=Markup(_embeddable(data)), script=Markup(script), style=Markup(style), script_hash=policy_hash(script),
        style_hash=policy_hash(style), **values)


def source(name: str) -> str:
    """A file's text. Not a Jinja include: CSS and JS may contain `{#` and `{{`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def policy_hash(text: str) -> str:
    """The hash by which the page's policy allows a script or style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _embeddable(value: object) -> str:
    """JSON for a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
