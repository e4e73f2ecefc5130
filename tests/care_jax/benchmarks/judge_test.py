"""The judge against a local endpoint that answers, fails and falls silent as told."""

import gzip
import http.server
import itertools
import json
import socketserver
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
            if isinstance(action, tuple):
                self.send_response(action[0])
                self.end_headers()
                self.wfile.write(action[1].encode())
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


@pytest.mark.parametrize(
    "message",
    [
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
        "'max_completion_tokens' instead.",
        "Unsupported value: 'temperature' does not support 0 with this model.",
    ],
)
def test_a_judge_that_refuses_a_setting_is_asked_without_it_from_then_on(endpoint, message):
    url, plan, seen = endpoint
    refusal = 400, json.dumps({"error": {"message": message, "code": "unsupported"}})
    plan |= {"a": [refusal, "1"], "b": ["0"]}
    judge = Judge(url, "gpt-5", num_retries=0, num_workers=1)
    assert judge.verdicts([case("a"), case("b")]) == [True, False]
    assert (judge.counts["requests"], judge.counts["failures"]) == (3, 0)
    for _, _, body in seen[1:]:
        assert "max_completion_tokens" in body and not body.keys() & {"max_tokens", "temperature"}


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"error": {"message": "The model m\\n does not exist"}}', "The model m does not exist"),
        ('{"error": "no such model"}', "no such model"),
        ('{"message": "no such model"}', "no such model"),
        ("no such model", "no such model"),
        ("<html><body>Not here</body></html>", ""),
        ("{" * 9, ""),
        ("[1]", ""),
        ("no model of k3y", "no model of <key>"),
    ],
)
def test_a_failure_says_what_the_endpoint_says(endpoint, monkeypatch, body, problem):
    monkeypatch.setenv("JUDGE_API_KEY", "k3y")
    url, plan, seen = endpoint
    plan |= {"a": [(404, body)]}
    judge = Judge(url, "m")
    assert judge.verdicts([case("a")]) == [None]
    assert judge.problem == f"404 Not Found {problem}".strip() and len(seen) == 1


def test_a_judge_may_think_before_its_verdict(endpoint):
    url, plan, seen = endpoint
    plan |= {"a": ["<think>0 or 1? 0.</think>\n\n1"], "b": ["<think>1, so"]}
    judge = Judge(url, "m", num_retries=0, num_workers=1)
    assert judge.verdicts([case("a"), case("b")]) == [True, None]
    assert "neither 0 nor 1 but '<think>1, so'" in judge.problem
    assert seen[0][2]["max_tokens"] >= 500


def test_a_silent_endpoint_times_out(endpoint):
    url, plan, _ = endpoint
    plan |= {"a": ["silence", "1"], "b": ["silence", "silence"]}
    judge = Judge(url, "m", timeout=0.2, num_retries=1)
    start = time.monotonic()
    assert judge.verdicts([case("a"), case("b")]) == [True, None]
    assert time.monotonic() - start < 5.0
    assert (judge.counts["timeouts"], judge.counts["failures"]) == (3, 1)


HEAD = b"HTTP/1.1 200 OK\r\n"
RIGHT = b'{"choices": [{"message": {"content": "1"}}]}'


def repeated(start, part, pause=0.0):
    """What has no end."""
    yield start
    while True:
        time.sleep(pause)
        yield part


def whole(body, head=HEAD):
    return [head + b"Content-Length: %d\r\n\r\n" % len(body) + body]


# What an endpoint sends, by the answer that it is asked about. Only the first is a verdict.
REPLIES = {
    "right": lambda: whole(RIGHT),
    "nothing": lambda: [],
    "a byte at a time": lambda: repeated(HEAD + b"\r\n", b" ", 0.1),
    "a header at a time": lambda: repeated(HEAD, b"X: y\r\n", 0.1),
    "interim responses": lambda: repeated(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a header without end": lambda: repeated(HEAD, b"x" * 4096),
    "chunks without end": lambda: repeated(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"
    ),
    "a trailer without end": lambda: repeated(
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"
    ),
    "gigabytes": lambda: repeated(HEAD + b"\r\n", b" " * (1 << 20)),
    "an end in the middle": lambda: [HEAD + b"Content-Length: 45\r\n\r\n" + RIGHT[:20]],
    "no JSON": lambda: whole(b"<html>1</html>"),
    "nested JSON": lambda: whole(b"[" * 100_000),
    "compressed JSON": lambda: whole(gzip.compress(RIGHT), HEAD + b"Content-Encoding: gzip\r\n"),
    "another type": lambda: whole(b'{"choices": [{"message": {"content": [1]}}]}'),
    "no HTTP": lambda: [b"\0" * 1000],
}


@pytest.fixture
def hostile():
    """The url of an endpoint that answers as in REPLIES."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            asked = b""
            while not asked.endswith(b"}"):
                asked += self.request.recv(1 << 16)
            answer = json.loads(asked.partition(b"\r\n\r\n")[2])["messages"][1]["content"]
            try:
                for part in REPLIES[answer.rpartition("\n")[2]]():
                    self.request.sendall(part)
            except OSError:  # the other side has hung up
                pass

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()


def test_whatever_an_endpoint_sends_costs_one_verdict_alone(hostile, monkeypatch):
    monkeypatch.setattr(judge_module, "_MAX_LOST", len(REPLIES))
    judge = Judge(hostile, "m", timeout=1.0, num_retries=0, num_workers=4)
    found = judge.verdicts([case(answer) for answer in (*REPLIES, "right")])
    assert found == [True, *[None] * (len(REPLIES) - 1), True]
    assert judge.counts["failures"] == len(REPLIES) - 1


def test_a_redirect_is_not_followed(endpoint, monkeypatch):
    """It would take the question, and the key, to whom nobody named."""
    url, plan, seen = endpoint
    plan |= {"a": ["1"]}
    head = b"HTTP/1.1 302 Found\r\nLocation: %s\r\n"
    places = ("ftp://127.0.0.1/", "file:///etc/hosts", f"{url}/chat/completions")
    for place in places:
        monkeypatch.setitem(REPLIES, place, lambda place=place: whole(b"", head % place.encode()))

    class Handler(socketserver.BaseRequestHandler):
        def handle(self):
            while not self.request.recv(1 << 16).endswith(b"}"):
                pass
            self.request.sendall(b"".join(REPLIES[next(turn)]()))

    turn = itertools.cycle(places)
    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = Judge(f"http://127.0.0.1:{server.server_address[1]}/v1", "m", num_workers=1)
        assert judge.verdicts([case("a")] * 3) == [None] * 3
        server.shutdown()
    assert judge.counts["requests"] == 3 and not seen  # a redirect would come again, so once each
    assert judge.problem == "302 Found"


@pytest.mark.parametrize("number", ["1e400", "-5", '"many"', "[]", "1" + "0" * 4000, "NaN", "true"])
def test_tokens_that_are_no_number_cost_no_verdict(endpoint, number):
    url, plan, _ = endpoint
    usage = f'"usage": {{"prompt_tokens": {number}, "completion_tokens": 2}}'
    plan |= {"a": [f'{{{usage}, "choices": [{{"message": {{"content": "1"}}}}]}}']}
    judge = Judge(url, "m", prices=(1.0, 1.0), num_workers=1, num_retries=0)
    assert judge.verdicts([case("a")]) == [True]
    assert 0 <= judge.cost <= 2 << 30


def test_an_endpoint_that_gives_no_verdict_is_left_alone_after_some_cases(endpoint, monkeypatch):
    url, plan, seen = endpoint
    monkeypatch.setattr(judge_module, "_MAX_LOST", 3)
    plan |= {"a": [429] * 2 + ["1"] + [429] * 100}
    judge = Judge(url, "m", num_retries=1, num_workers=1)
    assert judge.verdicts([case("a")] * 9) == [None, True, *[None] * 7]
    assert judge.counts["requests"] == len(seen) == 2 + 1 + 3 * 2
    assert judge.counts["failures"] == 8
    assert judge.problem == "429 Too Many Requests"


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
