"""What MkDocs leaves out: the notebook is a page too, with its stored outputs, and pictures open in full size."""

import json
import re
from html import escape
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

NOTEBOOK, PAGE = "guide/notebook.ipynb", "guide/notebook.md"
DOWNLOAD = "*This page is [a notebook](notebook.ipynb): get it, run it, change it.*"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the notebook as a page; the file itself stays beside it."""
    found = files.get_file_from_path(NOTEBOOK)
    assert found is not None
    title, *cells = json.loads(found.content_string)["cells"]
    parts = [_in_words(title), DOWNLOAD, *map(_in_words, cells)]
    files.append(File.generated(config, PAGE, content="\n\n".join(parts)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links to the notebook lead to its page."""
    return markdown if page.file.src_uri == PAGE else markdown.replace("notebook.ipynb)", "notebook.md)")


def on_page_content(html: str, **_: Any) -> str:
    """A click on a picture opens it in full size."""
    return re.sub(r'(<img [^>]*?src="(?!data:)([^"]+)"[^>]*>)', r'<a href="\2">\1</a>', html)


def _in_words(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return source
    return "\n\n".join([f"```python\n{source}\n```", *map(_output, cell["outputs"])])


def _output(output: dict[str, Any]) -> str:
    data = output.get("data", {})
    for kind in ("image/jpeg", "image/png"):
        if kind in data:
            return f'<img alt="output" src="data:{kind};base64,{"".join(data[kind].split())}">'
    if "text/html" in data:
        return re.sub(
            r'<style.*?</style>\n?|<p>.*?</p>\n?| border="1" class="dataframe"',
            "",
            "".join(data["text/html"]),
            flags=re.DOTALL,
        )
    said = "".join(data.get("text/plain", output.get("text", ""))).rstrip()
    return f'<pre class="said">{escape(said)}</pre>'
