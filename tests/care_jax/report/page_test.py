import base64
import hashlib
import json
import re

import pytest
from sampled_group import HOSTILE

from care_jax.report import page

STRINGS = (
    HOSTILE,
    "{{script}} {{data}} {{style}} {{script_hash}}",
    "\u2028\u2029\ud800 \x00 <!--<script> ]]> &lt;",
)


@pytest.mark.parametrize("text", STRINGS)
def test_hostile_text_stays_data_and_comes_back_as_it_was(text):
    data = page.to_json({"text": text, text: [text]})
    assert "<" not in data and data.isascii()
    rendered = page.render(data)
    (found,) = re.findall(r'id="data">(.*?)</script>', rendered)
    assert json.loads(found) == {"text": text, text: [text]}
    empty = page.render("{}")
    for mark in ("<script", "</script", "<!--", "<img", "{{"):
        assert rendered.lower().replace(data.lower(), "{}").count(mark) == empty.count(mark)
    assert rendered.count("</script>") == 2


def test_numbers_must_be_finite():
    with pytest.raises(ValueError):
        page.to_json(float("nan"))


def test_the_policy_lets_nothing_run_but_the_script_it_names():
    rendered = page.render("{}")
    script = re.search(r"<script>(.*?)</script>", rendered, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'content="(default-src[^"]*)"', rendered).group(1)
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy


def test_the_file_asks_for_nothing_from_outside():
    rendered = page.render("{}")
    assert not re.search(r"""(src|href)=["'](?!#)|@import|url\(|fetch\(|innerHTML""", rendered)
    assert re.findall(r"https?://[^\"']+", rendered) == ["http://www.w3.org/2000/svg"]
