"""HTML that cannot be broken by what it shows: every text is escaped, unless it is HTML that was made here."""

import html
import json
from collections.abc import Iterable, Mapping
from typing import Any


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


Content = str | Html | Iterable["Content"]

VOID = frozenset({"img", "input", "meta"})
"""Elements that hold nothing and have no end."""


def element(tag: str, /, *content: Content, **attributes: str | bool | None) -> Html:
    """An element. `class_` stands for the attribute `class`, and `aria_label` for `aria-label`. True gives an attribute
    without a value; False and None leave it out."""
    told = "".join(
        f" {_dashed(key)}" if value is True else f' {_dashed(key)}="{html.escape(value)}"'
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{tag}{told}>" if tag in VOID else f"<{tag}{told}>{joined(content)}</{tag}>")


def joined(content: Content) -> Html:
    """Texts and elements one after the other, the texts escaped."""
    if isinstance(content, Html):
        return content
    if isinstance(content, str):
        return Html(html.escape(content))
    return Html("".join(map(joined, content)))


def data_block(name: str, data: Mapping[str, Any]) -> Html:
    """Data for the page's script. No text in it can end the block or begin a comment."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return Html(f'<script type="application/json" id="{html.escape(name)}">{text}</script>')


def _dashed(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
