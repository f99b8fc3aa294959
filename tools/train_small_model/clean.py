"""Plain text of public-domain books from the two forms they are distributed in.

``standard_ebooks`` reads the XHTML sources of a Standard Ebooks edition (a folder holding
``content.opf`` and ``text/``); ``gutenberg`` reads a Project Gutenberg plain-text file.
Both return the same format: one paragraph a line, paragraphs separated by an empty line,
a section's title on a line beginning with ``# ``. Quotation marks and dashes are ASCII, so
that a prompt typed on a keyboard looks like the text that the model was trained on.
"""

from __future__ import annotations

import argparse
import re
import unicodedata
import xml.etree.ElementTree as ElementTree
from pathlib import Path

_XHTML = "{http://www.w3.org/1999/xhtml}"
_OPF = "{http://www.idpf.org/2007/opf}"
_EPUB_TYPE = "{http://www.idpf.org/2007/ops}type"
# Sections that are about the edition, not part of the work.
_NOT_TEXT = re.compile(
    r"titlepage|imprint|colophon|uncopyright|endnotes|loi|toc|dedication|preface|foreword"
    r"|introduction|epigraph|glossary|publisher|appendix|bibliography"
)
_ORDINAL = re.compile(r"(chapter|book|part|story) [\w-]+", re.IGNORECASE)
_FRONT_MATTER = re.compile(
    r"contents|list of|preface|introduction|^notes|note$|references|readers?$|^title|dedicat"
    r"|illustrat|edited by|collected by|translated|copyright|appendix|oyez|^to |^the end|welcome|^[ivxl]+\. ",
    re.IGNORECASE,
)
_PUNCTUATION = str.maketrans(
    {
        **dict.fromkeys("\u2018\u2019\u201b`", "'"),
        **dict.fromkeys("\u201c\u201d\u201e", '"'),
        **dict.fromkeys("\u2010\u2011\u2013\u2212", "-"),
        **dict.fromkeys("\u2014\u2015\u2e3a\u2e3b", "--"),
        "\u2026": "...",
        # Joiners, zero-width spaces, byte order mark, soft hyphen.
        **dict.fromkeys("\u2060\u200b\u200d\ufeff\u00ad", None),
    }
)
_SMALL_WORDS = frozenset("a an and as at but by for from in into of on or the to with".split())  # noqa: SIM905


def normalise(text: str) -> str:
    """ASCII punctuation, composed letters, single spaces."""
    text = unicodedata.normalize("NFC", text).translate(_PUNCTUATION)
    text = re.sub(r"[^\S\n]+", " ", text)
    return re.sub(r" *-- *", "--", text).strip()


def render(sections: list[tuple[str, list[str]]]) -> str:
    """The common text format of ``[(title, paragraphs), ...]``; empty sections are dropped."""
    blocks: list[str] = []
    for title, paragraphs in sections:
        if paragraphs:
            if title:
                blocks.append(f"# {title}")
            blocks.extend(paragraphs)
    return "\n\n".join(blocks) + "\n"


def parse(text: str) -> list[tuple[str, list[str]]]:
    """Inverse of ``render``."""
    sections: list[tuple[str, list[str]]] = []
    for block in text.strip("\n").split("\n\n"):
        if block.startswith("# "):
            sections.append((block[2:], []))
        else:
            if not sections:
                sections.append(("", []))
            sections[-1][1].append(block)
    return sections


def _title_case(title: str) -> str:
    if title != title.upper():
        return title
    words = title.lower().split()
    cased = [
        word if i and word in _SMALL_WORDS else re.sub(r"[a-z]", lambda m: m[0].upper(), word, count=1)
        for i, word in enumerate(words)
    ]
    return re.sub(r"\b([ivxl]+)\b\.?$", lambda m: m[0].upper(), " ".join(cased), flags=re.IGNORECASE)


def _flat(node: ElementTree.Element) -> str:
    """Text of a paragraph; ``<br/>`` becomes a line break, note references disappear."""
    if node.tag == _XHTML + "br":
        return "\n"
    if "noteref" in node.get(_EPUB_TYPE, ""):
        return ""
    parts = [re.sub(r"\s+", " ", node.text or "")]
    for child in node:
        parts += [_flat(child), re.sub(r"\s+", " ", child.tail or "")]
    return "".join(parts)


def _walk(node: ElementTree.Element, sections: list[tuple[str, list[str]]]) -> None:
    tag = node.tag.removeprefix(_XHTML)
    if tag in ("h1", "h2", "h3", "h4", "h5", "hgroup"):
        names = [normalise(_flat(part)) for part in (node if tag == "hgroup" else [node])]
        # A bare ordinal carries nothing where the section has a name as well.
        named = [name for name in names if not re.fullmatch(r"[IVXLC]+|\d+", name)] or names
        sections.append((": ".join(name for name in named if name), []))
    elif tag == "p":
        lines = [normalise(line) for line in _flat(node).split("\n")]
        paragraph = "\n".join(line for line in lines if line)
        if paragraph:
            sections[-1][1].append(paragraph)
    elif tag not in ("figure", "table", "nav") and node.get(_EPUB_TYPE) != "epigraph":
        for child in node:
            _walk(child, sections)


def standard_ebooks(epub: Path) -> str:
    """Text of the edition whose ``content.opf`` lies in `epub`, in reading order."""
    package = ElementTree.parse(epub / "content.opf")
    sections: list[tuple[str, list[str]]] = [("", [])]
    for item in package.iter(_OPF + "itemref"):
        name = item.get("idref", "")
        if _NOT_TEXT.search(name):
            continue
        body = ElementTree.parse(epub / "text" / name).getroot().find(_XHTML + "body")
        if body is not None:
            _walk(body, sections)
    return render(sections)


def _is_heading(block: str, blank_before: int) -> bool:
    lines = block.split("\n")
    if len(lines) > 2 or len(block) > 100 or not re.search("[A-Za-z]", block):
        return False
    if block.lstrip()[0] in "\"'(" or block.rstrip().endswith((",", ";", ":", "--", '"')):
        return False
    return block == block.upper() or (blank_before >= 3 and not block.startswith(" ") and len(block) < 60)


def gutenberg(raw: str) -> str:
    """Text of a Project Gutenberg file without licence, front matter and illustrations."""
    raw = raw.replace("\r\n", "\n")
    start = re.search(r"^\*\*\* ?START OF TH.*$", raw, re.MULTILINE)
    end = re.search(r"^(\*\*\* ?END OF TH|End of (the |this )?Project Gutenberg)", raw, re.MULTILINE)
    raw = raw[start.end() if start else 0 : end.start() if end else len(raw)]
    raw = re.sub(r"\[(Illustration|Footnote|Transcriber|Note)[^\]]*\]", "", raw)
    raw = re.sub(r"\[\d+\]|\{\d+\}", "", raw)
    raw = re.sub(r"_([^_]*)_", r"\1", raw)
    sections: list[tuple[str, list[str]]] = [("", [])]
    blank, heading_open = 0, False
    for block in re.split(r"(\n[ \t]*(?:\n[ \t]*)+)", raw):
        if not block.strip():
            blank = block.count("\n")
            continue
        if re.search(r"gutenberg|http|e-?text|Produced by|Transcrib", block, re.IGNORECASE):
            continue
        if re.fullmatch(r"[\s*.=_-]+", block):
            continue
        if _is_heading(block, blank):
            title = _title_case(normalise(block.replace("\n", " ")).rstrip("."))
            if heading_open:  # "CHAPTER I" and its name are two blocks
                previous = sections.pop()[0]
                if _ORDINAL.fullmatch(previous):
                    title = f"{previous}: {title}"
            sections.append((title, []))
            heading_open = True
            continue
        heading_open = False
        lines = block.strip("\n").split("\n")
        # Indented lines are verse: their line breaks are kept.
        verse = all(line.startswith("  ") for line in lines)
        joined = [normalise(line) for line in lines]
        paragraph = "\n".join(joined) if verse else normalise(" ".join(joined))
        if paragraph:
            sections[-1][1].append(paragraph)
    # Title page, table of contents and lists of pictures hold no long paragraph.
    prose = [
        (title, paragraphs)
        for title, paragraphs in sections
        if not _FRONT_MATTER.search(title)
        and max((len(x) for x in paragraphs if "\n" not in x), default=0) > 250
    ]
    return render(prose)


def alice(raw: str) -> str:
    """The held-out text from ``alice29.txt`` of the Canterbury corpus.

    Its quotations open with a backquote and close with an apostrophe after punctuation; both
    become double quotes, as in the rest of the corpus.
    """
    raw = raw.replace("\r\n", "\n")
    raw = raw[raw.index("CHAPTER I\n") : raw.rindex("THE END")]
    raw = re.sub(r"`([^`']*)'(?![a-z])", r'"\1"', raw)
    raw = re.sub(r"([.,!?;:)-])'(?![a-z])", r'\1"', raw).replace("`", '"')
    sections: list[tuple[str, list[str]]] = []
    for block in re.split(r"\n[ \t]*(?:\n[ \t]*)+", raw):
        lines = block.strip("\n").split("\n")
        if re.fullmatch(r"\s*CHAPTER [IVX]+", block):
            sections.append((_title_case(normalise(block)), []))
        elif sections and not sections[-1][1] and ":" not in sections[-1][0]:
            sections[-1] = (f"{sections[-1][0]}: {normalise(block)}", [])
        elif not re.fullmatch(r"[\s*]+", block):
            # A paragraph indents its first line only; verse indents all.
            verse = len(lines) > 1 and all(line.startswith("   ") for line in lines)
            joined = [normalise(line) for line in lines]
            prose = re.sub(r"(?<=[A-Za-z])- (?=[A-Za-z])", "-", normalise(" ".join(joined)))
            sections[-1][1].append("\n".join(joined) if verse else prose)
    return render(sections).replace("# ", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("standard-ebooks", "gutenberg", "alice"))
    parser.add_argument("source", type=Path, help="folder with content.opf, or a text file")
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    if arguments.kind == "standard-ebooks":
        text = standard_ebooks(arguments.source)
    else:
        raw = arguments.source.read_text(encoding="utf-8-sig")
        text = alice(raw) if arguments.kind == "alice" else gutenberg(raw)
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
