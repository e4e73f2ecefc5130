"""The logs of a run: rollouts.jsonl, metrics.jsonl, and report.html, which shows both.

`groups` makes the line of a prompt, `metrics` that of a step. `report` maintains the files, with
`pictures` and `curves`; `page` renders the HTML, CSS and scripts of this folder.
"""
