"""What a run leaves to read: rollouts.jsonl, metrics.jsonl, and report.html, which shows both.

`groups` makes the line of a prompt, `metrics` that of a step. `report` maintains the files, with
`pictures` and `curves`; `page` puts HTML, CSS and scripts of this folder together.
"""
