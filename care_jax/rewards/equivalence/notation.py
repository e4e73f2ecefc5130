"""Normalises and parses answer text: LaTeX wrapping, lists. Others: `quantities`, `assignments`.

Works on text only and evaluates nothing. Every scan is linear in the length of the text: whitespace
is collapsed first, patterns have no nested repetition over the same characters, and answers are
truncated to `MAX_CHARS`, before and after Unicode normalisation, which can lengthen them.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from care_jax.rewards.equivalence import characters, free_text, number_words
from care_jax.rewards.equivalence.boxes import FONT_NAMES, TEXT, TEXT_NAMES, closing, unbox

MAX_CHARS = 2000  # of an answer with whitespace collapsed; longer ones are truncated and marked
_MAX_ITEMS = 64  # of a list

# LaTeX commands mangled by string escapes, from sources that did not escape their backslashes.
_MANGLED = {
    "\x0crac": "\\frac", "\text": "\\text", "\times": "\\times", "\right": "\\right",
    "\tan": "\\tan", "\theta": "\\theta", "\x08oxed": "\\boxed", "\x08egin": "\\begin",
}  # fmt: skip
_BOLD = r"\\(?:mathbf|boldsymbol|bm) ?\{(\w)\}"
# Numerals before and after a text command that would join a numeral at its start or end.
_NUMERAL_BEFORE = re.compile(
    r"(?:[\d.,/]|[\w)}] ?[-+*]|\\(?:times|cdot|sqrt)"
    rf"|{TEXT_NAMES} ?\{{[^{{}}]*[\d.,/] ?\}})[ {{]*$"
)
_NUMERAL_AFTER = re.compile(
    rf"[ }}]*(?:[\d.,/^+*-]|\\(?:times|cdot)(?![a-z])|{TEXT_NAMES} ?\{{ ?[\d.,/])"
)
_LOOSE_SPACE = re.compile(r"(?<!\d) +| +(?!\d)")
# Between words a hyphen is a space, but not in sinx-cosx and x-theta.
_HYPHEN = re.compile(r"(?<=[a-zA-Z])-(?=[a-z]{4})|(?<=[a-z]{4})-(?=[a-z]{2})")
_SYMBOL = re.compile(
    rf"sqrt|(?<![a-z])(?:{characters.GREEK})(?![a-z])"
    r"|(?:sin|cos|tan|cot|sec|csc|log|ln|exp)h?[a-z]?(?![a-z])"
)
_AMPERSAND = re.compile(r"(?<=[a-z]{2}) ?& ?(?=[a-z]{2})")
_INDEX = re.compile(r"(?<=[a-zA-Z])(?<!l[gn])(?<!log)_(?:(\d)|\{(\d+)\})(?!\d)")
_BLACKBOARD = re.compile(r"\\mathbb\{([A-Z])\}")  # often written as a plain letter
_ANSWER = (
    "answer|ans|result|value|solution|conclusion|réponse|respuesta|resposta|risposta|antwort"
    "|jawaban|ответ|答え|정답"
)
_SO = r"(?-i:[Ss]o|[Tt]hus|[Hh]ence|[Tt]herefore),? "  # SO 2 is a formula
_LEAD = rf"(?:{_SO})?(?:(?:it|this|that)(?: is|['’]s)|they are) |{_SO}"
# What says that the answer follows, and that it came before.
_LABEL = re.compile(
    rf"(?:#+ ?)?(?:\*\*)?(?:{_SO})?"
    r"(?:(?:the|my|our|la|die|final|correct|right) )*"
    rf"(?:{_ANSWER})\.?(?:(?:\*\*)? ?:| (?:is|est|es|ist)(?![a-z])|\*\*|(?<=inal answer) )[ :*]*"
    r"|【答案】|(?:(?:所以|因此|故|最终|正确) ?,? ?)*(?:答案 ?[是为為]|(?:答案?|解) ?:) ?:? ?"
    r"|[故应]?选[择项]? ?:? ?(?=[(\[]?[A-Z](?! or))|#+ ?"
    rf"|{_LEAD}",
    re.IGNORECASE,
)
_IS_ANSWER = re.compile(
    r" (?:is (?:the )?(?:(?:final|correct|right) )?(?:answer|correct|right)|\((?:final )?answer\))$"
)
_TAG = re.compile(r"</?(?:b|i|u|em|strong|p|br|span|div|code)(?: +[\w-]+ ?=[^<>]*)? ?/?>", re.I)
# Decorations before and after an answer.
_OPENER = re.compile(
    r"(?:\\\\|\\(?:therefore|[Rr]ightarrow|implies|checkmark)(?![a-zA-Z])|[,;:=•▪►➤→⇒∴✓✔✅☑ ]"
    r"|\\approx(?![a-zA-Z]))+"
)
_CLOSER = " .,;:\\•✓✔✅☑"
_CLOSING_MARK = re.compile(r" ?\\(?:checkmark|qed)$|(?<=[a-zA-Z]{3})!+$")
_MAX_DECORATIONS = 12
_QUOTES = {'"': '"', "'": "'", "“": "”", "`": "`", "*": "*", "_": "_", "«": "»",
           "【": "】", "「": "」", "{": "}"}  # fmt: skip
_CONDITION = re.compile(r"[a-zA-Z] ?(?:[|:]|\\mid|\\in)")  # of the members of a set
_PAIRS = ('""', "''", "“”", "``", "**")  # around a text; a quote at its end alone is a prime
_AND_MORE = r" (?:and|or) (?:over|older|above|more|up|greater|higher)$"
# Between two assignments, in other languages.
_OR, _AND = "oder|ou|o|или", "und|et|y|e|и"
# Text in which `clean` changes only spaces and the final full stop.
_PLAIN = re.compile(
    r"(?!.*(?:pi|pct|per ?cent|\(mod|out of|is (?:correct|right)|infinity|base))"
    rf"(?!.*(?:{_ANSWER}|{_LEAD}|{_AND_MORE}))"
    rf"(?!.* (?:{_OR}|{_AND}) [a-z]\w* ?=)"
    r"(?!.*(?:/d|//|/-)|(?:in|the|year|at|less|fewer|under|below|more|greater|over|above|from) )"
    r"[a-z0-9(+-](?:[a-z0-9.,/()=+: -]{0,98}[a-z0-9)])?[. ]*",
    re.IGNORECASE | re.ASCII,
)


def _brace_fraction(match: re.Match) -> str:
    top, bottom = (part.strip("{}").strip() for part in match.groups())
    return f"\\frac{{{top}}}{{{bottom}}}"


def _unwrap_text(match: re.Match) -> str:
    """The content of `\\text{}`, in quotes if a numeral in it would join one outside."""
    name, content = match.groups()
    before = match.string[max(0, match.start() - 40) : match.start()]
    is_joined = re.match(TEXT_NAMES, name) and (
        (re.match(r" *[\d.,/]", content) and _NUMERAL_BEFORE.search(before))
        or (re.search(r"[\d.,/] *$", content) and _NUMERAL_AFTER.match(match.string, match.end()))
    )
    return f' "{content}" ' if is_joined else f" {content} "


def _list_of_system(match: re.Match) -> str:
    """The equations of a system as a list; anything else in braces stays."""
    rows = [row.strip(" ,;") for row in match.group(2).split("\\\\")]
    is_system = all(row.count("=") == 1 and not set(row) & set(",;&<>") for row in rows if row)
    return ", ".join(filter(None, rows)) if is_system else match.group()


# (pattern, replacement) of `clean`, in this order.
_REWRITTEN: tuple[tuple[str, str | Callable[[re.Match], str]], ...] = (
    (r"\{,\}|, ?\\! ?", ","),
    (r"\\!", ""),
    (r"!=", r"\\ne "),
    (r"(?<!\\)\$\$?((?:[^$\\]|\\.)+)\$\$?(?!\d)", r"\1"),  # delimiters of mathematics
    (r"(?<!\\)\\[()\[\]]|^\*\*|\*\*(?=[ .,;:]*$)", ""),
    (r"\\\$ ?(?=\.?\d)", "$"),  # a price keeps its dollar sign
    (r"\\?\$(?!\.?\d)", ""),
    (r"\\(?:left|right|displaystyle|[bB]igg?[lr]?)(?![a-zA-Z])\.?", ""),
    (r"^[Ff]rom (?=[$\d]\S* to [$\d])", ""),
    (r"^—(?=[\d.\\])|(?<=\d) ?~ ?(?=\d)", "-"),
    (r"(?<=\d) ?比 ?(?=\d)", ":"),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~", " "),
    (rf"{_BOLD} ?\\times ?{_BOLD}", r"\\vec{\1} \\times \\vec{\2}"),
    (
        r"\\(?:overrightarrow|vec|hat(?= ?\{? ?[ijk](?!\w))) ?"
        r"(?:\{ ?([a-zA-Z]|\\[a-z]+) ?\}|([a-zA-Z])(?!\w))",
        r"\\vec{\1\2}",
    ),
    (r"\\hat ?(?:\{ ?([a-zA-Z]) ?\}|([a-zA-Z])(?!\w))", r"\\hat{\1\2}"),
    (TEXT.pattern, _unwrap_text),
    (TEXT.pattern, _unwrap_text),  # \text can be nested
    (  # switches of font and size, colours and phantoms
        rf"(?:{FONT_NAMES}|\\(?:bf|it|rm|sf|tt|em|(?:bf|it|sl)(?:series|shape)"
        r"|(?:text|script)style|tiny|small|normalsize|large|Large|LARGE|huge|Huge))"
        r"(?![a-zA-Z{])(?! \{) ?"
        r"|\\(?:bf|it|rm|sf|tt|em|large|Large|LARGE|huge|Huge|textstyle)(?=[ {])"
        r"|\\(?:text)?color(?:box)? ?\{[^{}]*\}|\\(?:[hv]space\*?|[hv]?phantom) ?\{[^{}]*\}",
        "",
    ),
    (r"\\geq(?:q|slant)?(?![a-zA-Z])|(?<![<>=])>=", r"\\ge "),
    (r"\\leq(?:q|slant)?(?![a-zA-Z])|(?<![<>=])<=(?!>)", r"\\le "),
    (r"(?<=[\d ])\{([a-zA-Z ]+)\}", r" \1 "),
    (r"\\[dtc]frac(?![a-z])", r"\\frac"),
    (r"\\frac ?(\d|\{[^{}]*\}) ?(\d|\{[^{}]*\})", _brace_fraction),
    (r"\\sqrt ?(\[\w+\])? ?(\d|\\frac\{[^{}]*\}\{[^{}]*\})", r"\\sqrt\1{\2}"),
    (r"([_^])\{(\w)\}(?!\w)", r"\1\2"),
    (r"\\var(?=(?:epsilon|phi|theta|rho)(?![a-z]))", r"\\"),
    (
        r"(?:\\\{ ?)?\\begin ?\{(cases|aligned|array)\}(?:\{[lcr]+\})?(.*?)\\end ?\{\1\}",
        _list_of_system,
    ),
    (r"\\langle(?![a-z]) ?([^<>]*) ?\\rangle(?![a-z])", r"(\1)"),
    (r" ?\( ?(?:approximately|approx\.?|about|\\approx) ([^()]*)\)$", r" \\approx \1"),
    (r"\{ ?\}(?=\^)", ""),
    (r"[,;] ?(?:\.{3,}|\\[lc]?dots(?![a-z]))", ", …"),  # a list that goes on
    (r"^\\?\{ ?([a-zA-Z]) ?(?:[|:]|\\mid) ?(?=\1 ?=)([^<>]*?)\\?\}$", r"{\2}"),
    (r"^[a-zA-Z] *\\in *(?=\\\{[^|:]*$|\{[^|:]*,)", ""),  # a member of a set that is listed
    (
        r"\^ ?(?:\\circ(?![a-z])|\{ ?\\circ ?\})|\\(?:text)?degree(?![a-z])"
        r"|(?<=[\d)]) ?\^ ?(?:[oO](?![a-zA-Z])|\{ ?[oO] ?\})",
        " degrees ",
    ),
    (r"\\?%|(?<![a-zA-Z])(?:per ?cent(?:age points?)?|pct)(?![a-zA-Z])", "%"),
    (r"\\(?:underline|overline(?=\{[A-Z]{2}\})) ?\{([^{}]*)\}", r"\1"),
    (r"(?<![a-zA-Z\\])pi(?![a-zA-Z])", r"\\pi "),
    (r"\\varnothing", r"\\emptyset"),
    (r"\\mathbb ([A-Z])(?![a-zA-Z])", r"\\mathbb{\1}"),
    (r"\\in *([CNQRZ])(?![a-zA-Z])", r"\\in \\mathbb{\1}"),
    (r"(?<!\\)\\&", "&"),
    (r"(?<![\\a-zA-Z])[iI]nfinity(?![a-zA-Z])", r"\\infty "),
    (r"\+ ?/ ?-", r"\\pm "),
    (r"(?<!<)--?>|\\(?:to|longrightarrow)(?![a-z])", r"\\rightarrow "),
    (r"(?<=[A-Z]{2}) ?(?://|\|\|) ?(?=[A-Z]{2})", r" \\parallel "),
    (r"(?<![a-zA-Z\\])d([a-zA-Z])/d([a-zA-Z])(?![a-zA-Z])", r"\\frac{d\1}{d\2}"),
    (r"(?<=[\d)]) (?:in )?base (?=\d)", "_"),
    (rf"(?<=[\d%]){_AND_MORE}", "+"),
    (r"^(?i:in|(?:in )?(?:the )?year) (?=\d{4}$)", ""),
    (r"^(?i:(?:less|fewer) than|under|below) (?=[-$\\\d.])", "< "),
    (r"^(?i:(?:more|greater) than|over|above) (?=[-$\\\d.])", "> "),
    (r"^(?i:at least) (?=[-$\\\d.])", r"\\ge "),
    (r"^(?i:at most) (?=[-$\\\d.])", r"\\le "),
    (r"\\Delta ?(?=[A-Z]{3}(?![a-zA-Z]))", r"\\triangle "),
    (  # a phasor is its magnitude and angle
        r"(^|= ?)([^=,;()]*[\d})]) ?\\angle ?(-?\d[\d.]+|-?[\d.]+ degrees) *$",
        r"\1(\2, \3)",
    ),
    (r"\\angle ?\{([A-Z ]+)\}", r"\\angle \1"),
    (r"(\\angle) *([A-Z]) ([A-Z]) ([A-Z])(?![a-zA-Z])", r"\1 \2\3\4"),
    (r"(?<=\d) out of (?=\d)", "/"),
    (r"(?:(\() *\\?b?|\\p?)mod(?![a-z]) *\{? ?(\w+) ?\}?(?(1) ?\))", r"\\pmod{\2}"),
    (rf"(=[^=,]*[\w}})]) (?:{_OR}) (?=[a-zA-Z]\w* ?=)", r"\1 or "),
    (rf"(=[^=,]*[\w}})]) (?:{_AND}) (?=[a-zA-Z]\w* ?=)", r"\1 and "),
    (r"\^ ?\{?((?: ?\\prime(?![a-zA-Z]))+) ?\}?", lambda match: "'" * match.group().count("prime")),
)


def clean(text: str, in_sentences: bool = True) -> str:
    """Normalises an answer: no boxes, no math delimiters, single spaces, ASCII signs.

    An answer longer than `MAX_CHARS` is truncated and marked with its length. `in_sentences` means
    that the formula of a sentence stands for all of it.
    """
    if _PLAIN.fullmatch(text):
        return " ".join(text.split()).rstrip(" .")
    for mangled, command in _MANGLED.items():
        text = text.replace(mangled, command)
    text = " ".join(_TAG.sub("", text).split())
    if "\\boxed" in text or "\\fbox" in text:
        text = unbox(text)
    if len(text) > MAX_CHARS:
        return _truncated(text)
    if in_sentences:
        text = free_text.formula_of_sentence(text)
    if not (text.isascii() and text.isprintable()):
        text = characters.in_latex(text)
    if len(text) > MAX_CHARS:
        return _truncated(text)
    for pattern, replacement in _REWRITTEN:
        text = re.sub(pattern, replacement, text)
    return _undecorated(" ".join(text.split()))


def _truncated(text: str) -> str:
    return f"{text[:MAX_CHARS]}\N{HORIZONTAL ELLIPSIS}{len(text)}"


def _undecorated(text: str) -> str:
    """The text without labels, marks, quotes and braces around it, if something is left."""
    for _ in range(_MAX_DECORATIONS):
        bare = text[opener.end() :] if (opener := _OPENER.match(text)) else text
        bare = bare[label.end() :] if (label := _LABEL.match(bare)) else bare
        bare = _CLOSING_MARK.sub("", _IS_ANSWER.sub("", bare.rstrip(_CLOSER)))
        if len(bare) > 2 and _QUOTES.get(bare[0]) == bare[-1] and _is_wrapped(bare):
            bare = bare[1:-1].strip()
        if not bare or bare == text:
            break
        text = bare
    return text


def _is_wrapped(text: str) -> bool:
    """Whether the quotes or braces at the two ends of a text are a pair around one value."""
    inner = text[1:-1].strip()
    if text[0] != "{":
        is_alone = text[0] not in inner and text[-1] not in inner
        return is_alone or text[0] == inner[:1] == "*"
    is_set = any(c in ",;" for c in inner) or _CONDITION.match(inner)
    return (not is_set or inner[:1] == "{") and closing(text, 1) == len(text) - 1


_NO_SOLUTION = (
    "no solutions", "no solution exists", "no solutions exist", "there is no solution",
    "there are no solutions", "equation has no solution", "\\emptyset", "无解", "方程无解",
)  # fmt: skip
_SYNONYMS = dict.fromkeys(_NO_SOLUTION, "no solution") | {"dne": "does not exist"}


def caseless_key(text: str) -> str:
    """`key` without the case of symbols."""
    return key(text.casefold())


def key(text: str) -> str:
    """Comparison key: no spaces, dollar signs, leading article, outer quotes or brackets.

    The case of symbols is kept, that of words is not.
    """
    # A space between two digits is kept: it separates two numbers.
    text = free_text.without_article(free_text.fold_words(text))
    text = number_words.ORDINALS.get(text.replace(" ", "-"), _SYNONYMS.get(text, text))
    if "&" in text or ("-" in text and not _SYMBOL.search(text)):
        text = _AMPERSAND.sub(" and ", _HYPHEN.sub(" ", text))
    text = _LOOSE_SPACE.sub("", text.replace("$", ""))
    while len(text) > 2 and text[0] + text[-1] in _PAIRS:
        text = text[1:-1]
    text = _INDEX.sub(r"\1\2", text) if "_" in text else text  # x_1 is x1, and CO_2 is CO2
    text = _BLACKBOARD.sub(r"\1", text) if "bb" in text else text
    if len(text) == 3 and text[0] in "([" and text[2] in ")]":
        return text[1]
    return text[0] if len(text) == 2 and text[0].isalnum() and text[1] == ")" else text


_RELATION = re.compile(r"\\(?:lt|gt|leq?|geq?|neq?)(?![a-zA-Z])|[<>]|!=|\\(?:not|in)(?![a-zA-Z])")
_MARKED = re.compile(r"([^\s'])('+|\^ ?(?:T(?![a-zA-Z])|\\top|\{ ?(?:T|\\top) ?\}))")
_PUNCTUATION = re.compile(r"\\[{}]|[()\[\]{},;]")
_CONNECTIVE = re.compile(r"(?<![a-zA-Z])(?:and|or)(?![a-zA-Z])|(?<=\d)(?:and|or)(?=[\W_A-Z\d])")


def has_relation(text: str) -> bool:
    """Whether the text contains a relation other than equality."""
    return _RELATION.search(text) is not None


def marked(text: str) -> list[tuple[str, str]]:
    """The symbols that have primes or are transposed, and these marks, in alphabetical order."""
    return sorted((symbol, mark.strip("^{} ")) for symbol, mark in _MARKED.findall(text))


def split_tuple(text: str) -> tuple[str, list[str]] | None:
    """`(a, b) = (1, 2)` as the list `a = 1, b = 2`; None for any other text."""
    sides = [split_list(side) for side in text.split("=")]
    if len(sides) != 2 or not all(side and side[0] == "()" for side in sides):
        return None
    names, values = (side[1] for side in sides if side)
    if len(names) != len(values):
        return None
    return "", [f"{name} = {value}" for name, value in zip(names, values, strict=True)]


def is_sequence(text: str) -> bool:
    """Whether a text is values separated by semicolons alone, as those of several blanks are.

    Commas, brackets and names around the values say that they are something else.
    """
    listed = None if "," in text or "=" in text or has_relation(text) else split_list(text)
    return listed is not None and listed[0] == "" and text.count(";") == len(listed[1]) - 1


def split_list(text: str) -> tuple[str, list[str]] | None:
    """Brackets (opening and closing, "" for none) and items; None if the text is not a list.

    The brackets are "or" for alternatives, which are none, `2 or 3`.
    """
    text = text.strip()
    opened: list[re.Match] = []
    separators: dict[int, list[re.Match]] = {}  # by nesting depth
    brackets = ""
    for token in _PUNCTUATION.finditer(text):
        mark = token.group()[-1]
        if mark in "([{":
            opened.append(token)
        elif mark in ",;":
            separators.setdefault(len(opened), []).append(token)
        elif opened:
            opening = opened.pop()
            if opening.start() == 0 and token.end() == len(text):
                brackets = opening.group()[-1] + mark
                begin, end = opening.end(), token.start()
        else:
            return None
    if opened:
        return None
    if not brackets:
        begin, end = 0, len(text)
    splits = separators.get(1 if brackets else 0, [])
    starts = [begin, *(split.end() for split in splits)]
    ends = [*(split.start() for split in splits), end]
    items = [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]
    if not brackets:
        brackets = "or" if "or" in _CONNECTIVE.findall(text) else ""
        items = [part.strip() for item in items for part in _CONNECTIVE.split(item)]
    items = [item for item in items if item]
    is_list = len(items) > 1 or brackets in ("{}", "[]")
    return (brackets, items) if is_list and len(items) <= _MAX_ITEMS else None
