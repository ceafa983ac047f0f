"""The search index, made so that Chinese is found and so that no server is needed to read it.

Chinese is written without spaces: a mark that takes no room stands after every character of it, the
separator of `mkdocs.yml` splits there, and a word is found by its characters. (A separator that
looks around instead of consuming something would take every query apart until it matches all.)
"""

import json
import re
from pathlib import Path

MARK = "\u200b"
_HAN = re.compile(r"(?<=[\u4e00-\u9fff])(?=\w)|(?<=\w)(?=[\u4e00-\u9fff])")


def prepare(folder: Path) -> None:
    """Mark the Chinese of an index, and write it once more as a script, which a folder can load."""
    index = folder / "search_index.json"
    found = json.loads(index.read_text(encoding="utf-8"))
    for entry in found["docs"]:
        entry.update({part: marked(entry[part]) for part in ("title", "text")})
    told = json.dumps(found, ensure_ascii=False, separators=(",", ":"))
    index.write_text(told, encoding="utf-8")
    (folder / "search_index.js").write_text(f"var __index = {told}", encoding="utf-8")


def marked(text: str) -> str:
    """The text with every Chinese character apart.

    >>> marked("RNN 的状态").replace(MARK, "|")
    'RNN 的|状|态'
    """
    return _HAN.sub(MARK, text)
