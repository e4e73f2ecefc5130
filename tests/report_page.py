"""What a run's report.html shows."""

import json
import re


def data_of(workdir):
    """The data of the page, with the groups of its steps in "steps", by step."""
    (data,) = re.findall(r'id="data">(.*?)</script>', (workdir / "report.html").read_text())
    data = json.loads(data)
    data["steps"] = {}
    for group in data["groups"]:
        data["steps"].setdefault(group["step"], []).append(group)
    return data
