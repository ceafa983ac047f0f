"""The two languages of the site: which one a page is in, and the same page in the other."""

from publishing.pages import DOCS

LANGUAGES = {"en": "English", "zh": "中文"}


def language(source: str) -> str:
    """The language of a page, named from `docs/`.

    >>> language("zh/book/02-text.md"), language("text.md")
    ('zh', 'en')
    """
    return "zh" if source.startswith("zh/") else "en"


def alternates(source: str) -> list[dict[str, str]]:
    """What the switch in the header offers: this page in each language, else its first page."""
    plain = source.removeprefix("zh/")
    places = {"en": plain, "zh": f"zh/{plain}"}
    return [
        {
            "name": name,
            "lang": code,
            "link": _address(places[code] if (DOCS / places[code]).exists() else first),
        }
        for (code, name), first in zip(LANGUAGES.items(), ("index.md", "zh/index.md"), strict=True)
    ]


def _address(source: str) -> str:
    return source.removesuffix(".md") + ".html"
