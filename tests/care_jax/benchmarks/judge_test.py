"""The judge against a local endpoint that answers, fails and falls silent as told."""

import http.server
import json
import threading
import time

import pytest

from care_jax.benchmarks import judge as judge_module
from care_jax.benchmarks.judge import Case, Judge


@pytest.fixture
def endpoint(monkeypatch):
    """What to do with each request, by the model's answer in it; and what was asked."""
    plan, seen = {}, []
    monkeypatch.setattr(judge_module, "_FIRST_PAUSE", 0.01)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            seen.append((self.path, dict(self.headers), body))
            answer = body["messages"][1]["content"].rpartition("\n")[2]
            action = plan[answer].pop(0)
            if action == "silence":
                time.sleep(1.0)
                return
            if isinstance(action, int):
                self.send_error(action)
                return
            usage = {"prompt_tokens": 100, "completion_tokens": 2}
            reply = action if action.startswith("{") else json.dumps(
                {"choices": [{"message": {"content": action}}], "usage": usage}
            )  # fmt: skip
            self.send_response(200)
            self.end_headers()
            self.wfile.write(reply.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", plan, seen
    server.shutdown()
    server.server_close()


def case(answer):
    return Case("How long?", "0.5 m", answer)


def test_verdicts_come_in_the_order_of_the_cases_and_tokens_are_counted(endpoint):
    url, plan, seen = endpoint
    plan |= {"50 cm": ["1"], "5 cm": ["0"], "half a metre": [" 1.\n"]}
    judge = Judge(url, "some-model", prices=(2.0, 8.0))
    assert judge.verdicts([case("50 cm"), case("5 cm"), case("half a metre")]) == [
        True,
        False,
        True,
    ]
    assert judge.counts == {
        "requests": 3, "retries": 0, "timeouts": 0, "failures": 0, "prompt_tokens": 300,
        "completion_tokens": 6,
    }  # fmt: skip
    assert judge.cost == pytest.approx((300 * 2 + 6 * 8) / 1e6)
    path, _, body = seen[0]
    assert (path, body["model"], body["temperature"]) == ("/v1/chat/completions", "some-model", 0)
    assert "How long?" in body["messages"][1]["content"]
    assert "0.5 m" in body["messages"][1]["content"]


def test_a_failed_request_is_sent_again(endpoint):
    url, plan, _ = endpoint
    plan |= {"a": [500, "perhaps", '{"choices": []}', "1"]}
    judge = Judge(url, "m", num_retries=3)
    assert judge.verdicts([case("a")]) == [True]
    assert (judge.counts["requests"], judge.counts["retries"]) == (4, 3)
    assert judge.counts["failures"] == 0


def test_what_never_gets_a_verdict_is_counted_and_left_open(endpoint):
    url, plan, _ = endpoint
    plan |= {"a": [500, 500], "b": ["1"], "c": [401]}
    judge = Judge(url, "m", num_retries=1)
    assert judge.verdicts([case("a"), case("b"), case("c")]) == [None, True, None]
    # A refused key is refused again, so it is tried once.
    assert (judge.counts["requests"], judge.counts["failures"]) == (4, 2)


def test_a_silent_endpoint_times_out(endpoint):
    url, plan, _ = endpoint
    plan |= {"a": ["silence", "1"], "b": ["silence", "silence"]}
    judge = Judge(url, "m", timeout=0.2, num_retries=1)
    start = time.monotonic()
    assert judge.verdicts([case("a"), case("b")]) == [True, None]
    assert time.monotonic() - start < 5.0
    assert (judge.counts["timeouts"], judge.counts["failures"]) == (3, 1)


def test_nobody_at_the_url_is_a_failure_not_an_exception():
    judge = Judge("http://127.0.0.1:9/v1", "m", num_retries=0)
    assert judge.verdicts([case("a")]) == [None]
    assert judge.counts["failures"] == 1


def test_the_key_comes_from_the_environment(endpoint, monkeypatch):
    url, plan, seen = endpoint
    plan |= {"a": ["1", "1"]}
    monkeypatch.delenv("JUDGE_API_KEY", raising=False)
    Judge(url, "m").verdicts([case("a")])
    monkeypatch.setenv("JUDGE_API_KEY", "k")
    Judge(url, "m").verdicts([case("a")])
    assert [headers.get("Authorization") for _, headers, _ in seen] == [None, "Bearer k"]


def test_a_url_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="must start with http"):
        Judge("file:///etc/passwd", "m")
