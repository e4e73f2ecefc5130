"""Rollouts as a page of Markdown: `python -m care_jax.report.gallery --workdir=runs/words`.

For papers, documents and issues, where `report.html` cannot be shown. Prompts are taken from
`rollouts.jsonl`, from each outcome in turn, with every response in the order of its role: anchor,
hard negatives by distance, reflected, unused; equal neighbours share a row. Images are not in that
file and so not on the page.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from care_jax.report import rollout_log
from care_jax.report.groups import choose


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the page; 1 if there is nothing to show or a file cannot be read or written."""
    args = _parse(argv)
    try:
        return _write(args)
    except OSError as error:
        print(
            f"error: {error.strerror}: {error.filename}; name another --workdir or --out",
            file=sys.stderr,
        )
        return 1


def _write(args: argparse.Namespace) -> int:
    paths = [args.workdir / name for name in ("rollouts.1.jsonl", "rollouts.jsonl")]
    groups = [
        group for group in read_groups(paths) if args.first_step <= group["step"] <= args.last_step
    ]
    if not groups:
        print(
            f"error: {args.workdir} has no rollouts of these steps in rollouts.jsonl; name the "
            "workdir of a run whose report.rollouts_megabytes is above 0",
            file=sys.stderr,
        )
        return 1
    chosen = choose([group["outcome"] for group in groups], args.groups)
    page = "\n".join(line for index in chosen for line in lines_of(groups[index]))
    if args.out is None:
        print(page)
    else:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(page + "\n", encoding="utf-8")
        print(f"wrote {args.out}, {len(chosen)} of {len(groups)} prompts")
    return 0


def read_groups(paths: Iterable[pathlib.Path]) -> Iterator[dict[str, Any]]:
    """The prompts of a run, see `rollout_log`; a last line that was cut off is left out."""
    for path in paths:
        for line in rollout_log.read_lines(path) if path.exists() else ():
            try:
                yield json.loads(line)
            except ValueError:
                continue


def lines_of(group: Mapping[str, Any]) -> Iterator[str]:
    """A prompt and its responses as Markdown."""
    yield f"### Step {group['step']}, {group['outcome']}: {_text(group['source'])}"
    yield ""
    yield f"> {_text(group['question'])}"
    for choice in group["choices"]:
        yield f"> - {_text(choice)}"
    yield ""
    repair = group["repair"]
    change = ""
    if repair is not None:
        before, after = (_text(repair[name]) or "none" for name in ("before", "after"))
        did = f"left its answer {before}" if after == before else f"changed {before} to {after}"
        change = f" The repair of response {repair['of']} {did}."
    yield f"Right answer: {_text(group['gold'])}.{change}"
    yield ""
    yield "| | role | distance to the anchor | A_raw | A | verdict | response |"
    yield "|---|---|---|---|---|---|---|"
    for cells, equal in itertools.groupby(group["responses"], lambda r: _cells(r, group)):
        numbers = ", ".join(str(response["number"]) for response in equal)
        yield f"| {' | '.join([numbers, *cells])} |"
    yield ""


def _cells(response: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[str, ...]:
    """What stands in the row of a response, but for its number."""
    return (
        response["role"],
        _number(response["distance"]),
        _number(response["raw"]),
        _number(response["advantage"]),
        ", ".join([response["verdict"], *response["notes"]]),
        _with_cue(response, group),
    )


def _with_cue(response: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """The text of a response, the forced cue of a reflected one in bold."""
    text, given = response["text"], _given(response, group)
    cue = group["repair"]["cue"] if given else ""
    if not cue or not given.endswith(cue):
        return _text(text)
    return f"{_text(given.removesuffix(cue))} **{_text(cue)}** {_text(text[len(given) :])}"


def _given(response: Mapping[str, Any], group: Mapping[str, Any]) -> str:
    """The forced start of a response, context and cue; empty if there is none, or not known.

    Logs of older runs do not say how long it is.
    """
    if response["role"] != "reflected":
        return ""
    return response["text"][: group["repair"].get("num_given", 0)]


def _number(value: float | None) -> str:
    """The digits that the log has; fewer would round twice."""
    return "" if value is None else f"{value:g}"


def _text(value: Any) -> str:
    """What a model or dataset wrote, on one line, without any meaning in Markdown or HTML.

    GitHub makes links and mentions of rendered text, where an escaped @ is an @ again. A zero-width
    space, &#8203;, keeps it from mentions, e-mail addresses, URLs and numbers of issues.
    """
    line = " ".join(str(value).split())
    line = line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    line = re.sub(r"([\\`*_{}\[\]()#+!|~$])", r"\\\1", line)
    # At the start: items of lists, rules, the line below a heading.
    line = re.sub(r"^(\d+(?=\.( |$))|(?=[-=]))", r"\1\\", line)
    return re.sub(r"@|:(?=//)|www(?=\.)|#(?=\d)", r"\g<0>&#8203;", line)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m care_jax.report.gallery", description=str(__doc__).splitlines()[0]
    )
    add = parser.add_argument
    add("--workdir", type=pathlib.Path, required=True, help="of a run with RL")
    add("--groups", type=int, default=8, help="prompts on the page")
    add("--first_step", type=int, default=0, help="of RL")
    add("--last_step", type=int, default=sys.maxsize, help="of RL")
    add("--out", type=pathlib.Path, help="the page's file; else it is printed")
    args = parser.parse_args(argv)
    if args.groups < 1:
        parser.error(f"--groups must be at least 1, got {args.groups}")
    return args


if __name__ == "__main__":
    sys.exit(main())
