"""mkdocs hook: adds the built pages, and names the files that links outside of docs/ lead to.

Pages of ``build/pages`` (``python -m docs.generate``) join those of docs/; ``<!-- built: x.md -->``
becomes a link to one. ``[charts](../deploy)``, which works on GitHub as it stands, becomes "charts
(`deploy`)", or a link into ``repo_url`` where mkdocs.yml has one. A missing target fails the build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

log = logging.getLogger("mkdocs.hooks.site_links")

_ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2 *$", re.DOTALL | re.MULTILINE)
_PAGES = _ROOT / "build" / "pages"
_BUILT = re.compile(r"<!-- built: (\S+) -->")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the built pages. Raises where nobody has built them."""
    from mkdocs.exceptions import PluginError
    from mkdocs.structure.files import File

    found = sorted(_PAGES.rglob("*.md"))
    if not found:
        raise PluginError(f"no pages in {_PAGES}: `make docs-site` writes them first")
    for path in found:
        name = path.relative_to(_PAGES).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Rewrite the links of one page; text in fences stays."""
    markdown = _BUILT.sub(r"\n[The page](\1)", markdown)
    parts, at = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_rewritten(markdown[at : fence.start()], page, config), fence[0]]
        at = fence.end()
    return "".join([*parts, _rewritten(markdown[at:], page, config)])


def _rewritten(text: str, page: Any, config: Any) -> str:
    folder = posixpath.dirname(page.file.src_uri)

    def one(link: re.Match[str]) -> str:
        words, target = link[1], link[2].partition("#")[0]
        if not target or ":" in target:
            return link[0]
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return link[0]
        if not (_ROOT / path).exists():
            log.warning("%s links to %s, which is not there", page.file.src_uri, target)
        if config.get("repo_url"):
            return f"[{words}]({config['repo_url'].rstrip('/')}/blob/main/{path})"
        return words if path in words else f"{words} (`{path}`)"

    return _LINK.sub(one, text)
