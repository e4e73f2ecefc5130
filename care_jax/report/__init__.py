"""The logs of a run: rollouts.jsonl, metrics.jsonl, and report.html, which shows both.

`groups` makes the line of a prompt, `metrics` that of a step, which `trackers` send to wandb and
MLflow. `report` maintains the files, with `pictures`; `drawing` draws the page of one or more runs
from `curves`, `about` and `terms`; `page` renders the HTML, CSS and scripts of this folder.
"""
