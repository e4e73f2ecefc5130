"""Writes the Unicode characters of mathematics in LaTeX."""

from __future__ import annotations

import re
import unicodedata

_SYMBOLS = {
    "−": "-", "–": "-", "π": "\\pi ", "×": "\\times ", "·": "\\cdot ", "÷": "/", "≤": "\\le ",
    "≥": "\\ge ", "≠": "\\ne ", "≈": "\\approx ", "±": "\\pm ", "∞": "\\infty ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "∅": "\\emptyset ", "°": "^\\circ ", "∠": "\\angle ",
    "。": ". ", "，": ", ", "、": ", ", "：": ":", "；": "; ", "⩽": "\\le ",
    "⩾": "\\ge ", "⋅": "\\cdot ", "º": "^\\circ ", "˚": "^\\circ ", "△": "\\triangle ",
    "∶": ":", "‐": "-", "∥": "\\parallel ", "⊥": "\\perp ", "∽": "\\sim ", "≌": "\\cong ",
    "≅": "\\cong ", "→": "\\rightarrow ", "∧": "\\wedge ", "∨": "\\vee ", "⊙": "\\odot ",
    "⟨": "\\langle ", "⟩": "\\rangle ", "∘": "\\circ ", "︰": ":",
    "⌊": "\\lfloor ", "⌋": "\\rfloor ", "⌈": "\\lceil ", "⌉": "\\rceil ", "⟂": "\\perp ",
    "∆": "\\Delta ", "∡": "\\angle ", "∢": "\\angle ", "‖": "||", "∣": "|", "∉": "\\notin ",
    "≡": "\\equiv ", "≦": "\\le ", "≧": "\\ge ", "∙": "\\cdot ", "∕": "/",
    **{c: f"\\mathbb{{{unicodedata.normalize('NFKC', c)}}}" for c in "ℂℕℚℝℤ"},
    "或": " or ", "和": " and ", "且": " and ",
    "√": "\\sqrt", "∛": "\\sqrt[3]", "∜": "\\sqrt[4]", "′": "'", "″": "''", "‘": "'", "’": "'",
}  # fmt: skip
_GREEK = {c: unicodedata.name(c).split()[-1] for c in "αβγδεζηθικλμνξρστυφχψωΓΔΘΛΞΣΦΨΩ"}
_GREEK |= {"λ": "LAMBDA", "Λ": "LAMBDA"}  # LAMDA for Unicode
_GREEK = {c: name.lower() if c.islower() else name.title() for c, name in _GREEK.items()}
GREEK = "|".join(_GREEK.values())  # the commands of all letters but pi
_SYMBOLS |= {c: f"\\{name} " for c, name in _GREEK.items()}
_TRANSLATION = {ord(key): value for key, value in _SYMBOLS.items()}

_SUPERSCRIPTS = re.compile("[\u2070-\u207f¹²³\u02b0-\u02b8\u02e1-\u02e3\u1d2c-\u1d61]+")
_SUBSCRIPTS = re.compile("[\u2080-\u209c\u1d62-\u1d6aⱼ]+")
_DEGREE_RING = re.compile(r"(?<=\d) ?∘|\^ ?\{? ?∘ ?\}?")  # elsewhere it composes functions
_BETWEEN_CIRCLED = re.compile("(?<=[①-⑳])(?=[①-⑳])")
_ROOT_SIGN = re.compile(r"([√∛∜]) ?(\d+(?:\.\d+)?|\w)")


def in_latex(text: str) -> str:
    """The text with signs, scripts, roots and fractions in LaTeX, and no control characters."""
    text = _SUBSCRIPTS.sub(r"_{\g<0>}", _SUPERSCRIPTS.sub(r"^{\g<0>}", text))
    text = _BETWEEN_CIRCLED.sub(", ", _DEGREE_RING.sub("°", text))
    text = _ROOT_SIGN.sub(r"\1{\2}", text).translate(_TRANSLATION)
    text = "".join(map(_written_out, text))
    # NFKC makes signs, such as the degree in ℃ and the minus in a superscript.
    text = unicodedata.normalize("NFKC", text).replace("⁄", "/").translate(_TRANSLATION)
    return "".join(c for c in text if unicodedata.category(c) not in ("Cf", "Cc"))


def _written_out(c: str) -> str:
    """A vulgar fraction in LaTeX, as 5½ is not 51/2, and ① as (1); other characters as they are."""
    if "①" <= c <= "⑳":
        return f"({unicodedata.numeric(c):g})"
    top, slash, bottom = unicodedata.normalize("NFKC", c).partition("⁄")
    return f"\\frac{{{top}}}{{{bottom}}}" if slash and bottom else c
