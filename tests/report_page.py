"""What a run's report.html shows."""

import json
import re


def data_of(workdir):
    """The data of a page of one run, with the groups of its steps in "steps", by step."""
    (data,) = re.findall(r'id="data">(.*?)</script>', (workdir / "report.html").read_text())
    data = json.loads(data)
    (run,) = data.pop("runs")
    data |= run
    data["steps"] = {}
    for group in data["groups"]:
        data["steps"].setdefault(group["step"], []).append(group)
    return data
