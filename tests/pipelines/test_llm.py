"""The promises of `llm.generate`, against nodes that speak the real protocols over real sockets."""

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_node import WORDS, FakeNode
from patience import PATIENCE

from dataloader.pipelines import Context, Stopped, llm, resolve, steps
from dataloader.testing import Result, run

TEXT = " ".join(WORDS)
MODEL = "llama3.2:3b"
MLX_MODEL = "mlx-community/Llama-3.2-3B"
PROMPT = "What is the meaning of it all?"
Ask = Callable[..., Any]  # a Result


@pytest.fixture
def ollama() -> Iterator[FakeNode]:
    node = FakeNode("ollama", (MODEL,))
    yield node
    node.close()


@pytest.fixture
def mlx() -> Iterator[FakeNode]:
    node = FakeNode("mlx", (MLX_MODEL,))
    yield node
    node.close()


@pytest.fixture
def down() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No memory of other tests' nodes; this machine may be as busy as it likes."""
    monkeypatch.setattr(llm, "_scanned", {})
    monkeypatch.setenv("OLLAMA_BASE_URL", "")
    monkeypatch.setenv("DL_LLM_BUSY_PERCENT", "100")
    return monkeypatch


@pytest.fixture
def ask(ollama: FakeNode, mlx: FakeNode, settings: pytest.MonkeyPatch) -> Ask:
    """Run a job of one attempt with both nodes in the settings, Ollama's first."""
    settings.setenv("OLLAMA_API_URL", ollama.url)
    settings.setenv("MLX_API_URL", mlx.url)

    def ask(**args: Any) -> Result:
        more = {name: args.pop(name) for name in ("cancel_at", "max_attempts") if name in args}
        return run("llm.generate", {"prompt": PROMPT} | args, **({"max_attempts": 1} | more))

    return ask


def reasons(result: Any) -> list[str]:
    return [each["reason"] for each in result.value["passed_over"]]


def test_the_answer_of_an_ollama_node(ask: Ask, ollama: FakeNode, mlx: FakeNode) -> None:
    result = ask(system="Be short.", options={"temperature": 0.5}, max_tokens=50)
    assert result.status == "succeeded"
    assert result.value == {"text": TEXT, "tokens": 8, "node": ollama.url, "model": MODEL, "passed_over": []}
    assert ollama.questions == [
        {
            "model": MODEL,
            "prompt": PROMPT,
            "system": "Be short.",
            "stream": True,
            "options": {"temperature": 0.5, "num_predict": 50},
        }
    ]
    assert mlx.questions == []


def test_the_answer_of_an_mlx_node(ask: Ask, ollama: FakeNode, mlx: FakeNode) -> None:
    result = ask(model=MLX_MODEL)
    assert result.value == {"text": TEXT, "tokens": 8, "node": mlx.url, "model": MLX_MODEL, "passed_over": []}
    assert [body["messages"] for body in mlx.questions] == [[{"role": "user", "content": PROMPT}]]
    assert ollama.questions == []


def test_the_progress_counts_tokens_and_the_text_comes_last(ask: Ask) -> None:
    progress = ask().progress
    tokens = [each["tokens"] for each in progress]
    assert tokens == sorted(tokens)
    assert set(tokens) == set(range(9))
    assert [("text" in each) for each in progress] == [False] * (len(progress) - 1) + [True]


def test_a_line_of_an_answer_ends_with_a_line_feed_alone(ask: Ask, mlx: FakeNode) -> None:
    mlx.says = ["Привет\u2028и\u0085пока"]
    assert ask(model=MLX_MODEL).value["text"] == "Привет\u2028и\u0085пока"


def test_an_answer_without_end_is_given_up(ask: Ask, ollama: FakeNode, settings: pytest.MonkeyPatch) -> None:
    settings.setattr(llm, "_LONGEST_ANSWER", 300)
    assert "its answer is longer than 300 bytes" in str(ask().error)
    settings.setattr(llm, "_scanned", {})
    settings.setattr(llm, "_LONGEST_LIST", 20)
    assert f"{ollama.url}: it has answered with more than 20 bytes" in str(ask().error)


def _event(content: str = "", finish: str | None = None, **more: Any) -> str:
    return json.dumps({"choices": [{"delta": {"content": content}, "finish_reason": finish}]} | more)


HELLO, WORLD, STOP = _event("Hello "), _event("world"), _event(finish="stop")
USAGE = json.dumps({"choices": [], "usage": {"completion_tokens": 2}})
DONE = "data: [DONE]\n\n"
LEGAL = {
    "no space": f"data:{HELLO}\n\ndata:{WORLD}\n\ndata:{STOP}\n\ndata:[DONE]\n\n",
    "more spaces": f"data:  {HELLO} \n\ndata:\t{WORLD}\n\ndata: [DONE] \n\n",
    "no [DONE]": f"data: {HELLO}\n\ndata: {WORLD}\n\ndata: {STOP}\n\n",
    "no [DONE] but the usage": f"data: {HELLO}\n\ndata: {WORLD}\n\ndata: {STOP}\n\ndata: {USAGE}\n\n",
    "the end with the last word": f"data: {HELLO}\n\ndata: {_event('world', 'length')}\n\n",
    "no final newline": f"data: {HELLO}\n\ndata: {WORLD}\n\ndata: [DONE]",
    "no final newline and no [DONE]": f"data: {HELLO}\n\ndata: {WORLD}\n\ndata: {STOP}",
    "error null": f"data: {_event('Hello ', error=None)}\n\ndata: {_event('world', error=None)}\n\n{DONE}",
    "error empty": f"data: {_event('Hello ', error='')}\n\ndata: {_event('world', error={})}\n\n{DONE}",
    "delta null": f'data: {HELLO}\n\ndata: {{"choices": [{{"delta": null}}]}}\n\ndata: {WORLD}\n\n{DONE}',
    "choices null": f'data: {HELLO}\n\ndata: {{"choices": null}}\n\ndata: {WORLD}\n\n{DONE}',
    "choice null": f'data: {HELLO}\n\ndata: {{"choices": [null]}}\n\ndata: {WORLD}\n\n{DONE}',
    "no choices": f'data: {{"type": "ping"}}\n\ndata: {HELLO}\n\ndata: {WORLD}\n\n{DONE}',
    "usage null": f"data: {_event('Hello ', usage=None)}\n\ndata: {WORLD}\n\n{DONE}",
    "byte order mark": f"\ufeffdata: {HELLO}\n\ndata: {WORLD}\n\n{DONE}",
    "CR": f"data: {HELLO}\r\rdata: {WORLD}\r\r{DONE}".replace("\n", "\r"),
    "CRLF": f"data: {HELLO}\r\n\r\ndata: {WORLD}\r\n\r\n{DONE}".replace("\n", "\r\n"),
    "single line ends": f"data: {HELLO}\ndata: {WORLD}\ndata: [DONE]\n",
    "other fields": f"retry: 5\nid\nevent: chunk\nid: 7\nx-mark: 1\ndata: {HELLO}\n\n:\ndata: {WORLD}\n\n{DONE}",
}


@pytest.mark.parametrize("size", [10**6, 1, 7])
@pytest.mark.parametrize("form", LEGAL)
@pytest.mark.long
def test_every_legal_form_of_events_is_an_answer(ask: Ask, mlx: FakeNode, form: str, size: int) -> None:
    body = LEGAL[form].encode()
    mlx.streams = [body[at : at + size] for at in range(0, len(body), size)]
    result = ask(model=MLX_MODEL)
    assert (result.status, result.value.get("text"), result.value["tokens"]) == ("succeeded", "Hello world", 2)


OLLAMA = '{"response": "Hello ", "done": false}\n{"response": "world", "done": false}\n{"response": "", "done": true}'


@pytest.mark.parametrize(
    "body",
    [
        OLLAMA,
        f"\ufeff{OLLAMA}\n",
        OLLAMA.replace("\n", "\r\n"),
        OLLAMA.replace('"done"', '"error": null, "done"'),
        OLLAMA.replace("\n", '\n{"status": "loading"}\n\n'),
    ],
)
def test_every_form_of_ollamas_lines_is_an_answer(ask: Ask, ollama: FakeNode, body: str) -> None:
    ollama.streams = [body.encode()]
    result = ask(model=MODEL)
    assert (result.status, result.value.get("text"), result.value["tokens"]) == ("succeeded", "Hello world", 2)


@pytest.mark.usefixtures("silence_is_safe")
def test_an_answer_that_is_whole_needs_no_end_of_the_stream(ask: Ask, mlx: FakeNode) -> None:
    mlx.streams, mlx.behave = [f"data: {HELLO}\n\ndata: {WORLD}\n\ndata: {STOP}\n\n".encode()], "hangs"
    assert ask(model=MLX_MODEL).value["text"] == "Hello world"
    assert mlx.hung_up.wait(PATIENCE)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (f"data: {HELLO}\n\n", "it ended its answer in the middle"),
        (f"data: {HELLO}\n\ndata: {WORLD[:-5]}", "its answer is not in its protocol"),
        (f"data: {HELLO}\n\ndata: {WORLD[:-5]}\n\n{DONE}", "its answer is not in its protocol"),
        (f'data: {HELLO}\n\ndata: {{"error": "too long"}}\n\n{DONE}', "it broke off: too long"),
        ("Internal Server Error", "its answer is not in its protocol"),
    ],
)
def test_a_stream_that_is_no_whole_answer_is_none(ask: Ask, mlx: FakeNode, body: str, why: str) -> None:
    mlx.streams = [body.encode()]
    assert ask(model=MLX_MODEL).error == f"no node has answered ({MLX_MODEL}): {mlx.url}: {why}"


def patient_with(node: FakeNode) -> Callable[..., Any]:
    """Ask this node with PATIENCE, for a stall of the machine is no silence."""
    answer_of = llm._answer_of

    def asked(asked: llm.Node, wanted: Any, result: Any, silence_sec: float, check: Any) -> Any:
        return answer_of(asked, wanted, result, PATIENCE if asked.url == node.url else silence_sec, check)

    return asked


SILENT = "it was silent for 0.3 s"
BROKEN = "it cannot be reached, or broke the connection (IncompleteRead)"
CASES = [
    ("hangs", SILENT),
    ("mute", SILENT),
    ("echoes", "its answer only repeats the prompt"),
    ("empty", "its answer is empty"),
    ("fails", "it answered 500, model runner has unexpectedly stopped"),
    ("busy", "it is overloaded: it answered 503, server busy, please try again. maximum pending requests exceeded"),
    ("breaks", "it broke off: an error was encountered while running the model"),
    ("moves", "it answered 302"),
    ("babbles", "its answer is not in its protocol"),
]


@pytest.mark.parametrize(
    ("first", "behave", "why"),
    [
        *(("ollama", *case) for case in [*CASES, ("cuts", BROKEN)]),
        *(("mlx", *case) for case in [*CASES, ("cuts", "it ended its answer in the middle")]),
    ],
)
def test_a_node_without_an_answer_is_passed_over(
    first: str, behave: str, why: str, ask: Ask, ollama: FakeNode, mlx: FakeNode, settings: pytest.MonkeyPatch
) -> None:
    if first == "mlx":
        settings.setenv("DL_LLM_CATEGORIES", '{"default": ["mlx-community/*", "*"]}')
    one, other = (ollama, mlx) if first == "ollama" else (mlx, ollama)
    assert ask().value["node"] == one.url
    if why == SILENT:
        settings.setenv("DL_LLM_SILENCE_SEC", "0.3")
        settings.setattr(llm, "_answer_of", patient_with(other))
    one.behave, one.elsewhere = behave, other.url
    result = ask()
    assert (result.status, reasons(result)) == ("succeeded", [why])
    assert (result.value["text"], result.value["node"]) == (TEXT, other.url)


def test_a_slow_node_is_no_silent_one(ask: Ask, ollama: FakeNode, settings: pytest.MonkeyPatch) -> None:
    settings.setenv("DL_LLM_SILENCE_SEC", "3")
    ollama.behave, ollama.pause_sec, ollama.says = "slow", 0.1, ["word"] * 31
    result = ask()
    assert (result.status, reasons(result)) == ("succeeded", [])
    assert result.seconds > 3


@pytest.mark.parametrize(
    ("is_valid", "reason"), [(True, "it accepts no connection"), (False, "there is no address for it")]
)
def test_a_node_that_cannot_be_asked_is_passed_over_and_its_password_not_shown(
    ask: Ask, down: str, settings: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_valid: bool, reason: str
) -> None:
    url = down if is_valid else "http://300.1.1.1"
    settings.setenv("OLLAMA_API_URL", url.replace("//", "//user:s3cret@"))
    result = ask()
    assert result.value["model"] == MLX_MODEL
    assert result.value["passed_over"] == [{"node": url, "reason": reason}]
    assert f"node passed over: {url}: {reason}" in caplog.text
    assert "s3cret" not in f"{caplog.text} {result.progress}"


def test_a_nodes_password_is_sent_to_this_node(ask: Ask, ollama: FakeNode, settings: pytest.MonkeyPatch) -> None:
    settings.setenv("OLLAMA_API_URL", ollama.url.replace("//", "//user:s3cret@"))
    assert ask().status == "succeeded"
    assert ollama.passwords == {"Basic dXNlcjpzM2NyZXQ="}


def test_with_none_left_the_error_names_each_node_and_the_job_is_tried_again(
    ask: Ask, ollama: FakeNode, mlx: FakeNode
) -> None:
    ollama.behave, mlx.behave = "fails", "echoes"
    result = ask(max_attempts=2, category="coding")
    assert (result.status, result.attempts) == ("failed", 2)
    assert result.error == (
        f"no node has answered (category coding): {ollama.url}: it answered 500, model runner has unexpectedly stopped;"
        f" {mlx.url}: its answer only repeats the prompt"
    )
    assert len(ollama.questions) == len(mlx.questions) == 2


def test_a_redirect_is_not_followed_in_a_scan_either(ask: Ask, ollama: FakeNode, mlx: FakeNode) -> None:
    ollama.behave, ollama.elsewhere = "moves", mlx.url
    assert reasons(ask()) == ["it answered 302 to /api/tags"]
    assert not [path for path, _ in mlx.asked if path.startswith("/api")]


def test_a_node_that_says_that_it_is_busy_is_passed_over(
    ask: Ask, ollama: FakeNode, mlx: FakeNode, settings: pytest.MonkeyPatch
) -> None:
    settings.setenv("OLLAMA_API_URL", ollama.url)
    ollama.status = {"queue_percent": 97, "cpu_percent": 3, "ram_percent": 40}
    mlx.status = {"active_requests": 1, "max_concurrency": 1}
    settings.setenv("DL_LLM_BUSY_PERCENT", "96")
    settings.setattr(llm, "_is_here", lambda url: False)
    result = ask()
    assert result.error == (
        f"no node has answered (category default): {ollama.url}: its queue is at 97 %, above 96 %;"
        f" {mlx.url}: it has 1 of 1 requests in flight"
    )
    ollama.status = {"queue_percent": 3}
    assert ask().status == "succeeded"
    assert len(ollama.questions) == 1


def test_a_node_on_this_machine_is_as_busy_as_the_machine(ask: Ask, settings: pytest.MonkeyPatch) -> None:
    settings.setenv("DL_LLM_BUSY_PERCENT", "1")
    assert ", above 1 %" in str(ask().error)


def test_an_mlx_node_gets_no_more_requests_than_its_places(
    ask: Ask, mlx: FakeNode, settings: pytest.MonkeyPatch
) -> None:
    settings.setenv("DL_LLM_MLX_CONCURRENT", "2")
    node = llm.Node("mlx", mlx.url)
    with llm.place(node, 2), llm.place(node, 2):
        assert "this machine has 2 of 2 requests in flight there" in str(ask(model=MLX_MODEL).error)
    assert ask(model=MLX_MODEL).status == "succeeded"


def test_a_scan_counts_for_a_minute_or_until_a_model_is_missed(
    ask: Ask, ollama: FakeNode, settings: pytest.MonkeyPatch
) -> None:
    def scans() -> int:
        return [path for path, _ in ollama.asked].count("/api/tags")

    assert [(ask().status, scans()) for _ in range(2)] == [("succeeded", 1)] * 2
    ollama.models += ("phi4:14b",)
    assert (ask(model="phi4:14b").value["model"], scans()) == ("phi4:14b", 2)
    settings.setattr(llm, "KEPT_SEC", 0.0)
    assert (ask().status, scans()) == ("succeeded", 3)


def test_a_model_in_memory_is_preferred(ask: Ask, ollama: FakeNode) -> None:
    ollama.models, ollama.loaded = ("a-coder:7b", "b-coder:7b"), ("b-coder:7b",)
    assert ask(category="coding").value["model"] == "b-coder:7b"


def test_a_model_that_no_node_has_ends_the_job_and_names_those_that_are_there(ask: Ask, ollama: FakeNode) -> None:
    result = ask(model="gpt-5", max_attempts=3)
    assert (result.status, result.attempts) == ("failed", 1)
    assert result.error == f"model: no node has gpt-5; there are {MODEL}, {MLX_MODEL}"
    assert ollama.questions == []


def test_a_model_that_a_node_may_have_that_is_down_is_tried_again(
    ask: Ask, down: str, settings: pytest.MonkeyPatch
) -> None:
    settings.setenv("OLLAMA_API_URL", down)
    result = ask(model=MODEL, max_attempts=2)
    assert (result.status, result.attempts) == ("failed", 2)
    assert result.error == f"no node has answered ({MODEL}): {down}: it accepts no connection"


def test_nothing_but_the_settings_names_a_host(ask: Ask, ollama: FakeNode, settings: pytest.MonkeyPatch) -> None:
    settings.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    settings.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert ask().status == "succeeded"
    assert ask(host="http://127.0.0.1:1").error.startswith("host: there is no such argument")


@pytest.mark.usefixtures("silence_is_safe")
@pytest.mark.parametrize("behave", ["hangs", "mute"])
def test_a_cancellation_closes_the_connection_while_the_node_says_nothing(
    behave: str, ask: Ask, ollama: FakeNode, context: Context
) -> None:
    ollama.behave = behave
    context._run.must_stop = ollama.silent.is_set  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        [*steps(resolve("llm.generate"), {"prompt": PROMPT}, context)]
    assert ollama.hung_up.wait(PATIENCE)


@pytest.mark.usefixtures("silence_is_safe")
@pytest.mark.parametrize("point", [1, 2, 3])
def test_a_cancellation_before_the_answer_asks_no_node_in_its_place(point: int, ask: Ask, ollama: FakeNode) -> None:
    ollama.behave = "mute"
    assert ask(cancel_at=point).status == "canceled"
    assert len(ollama.questions) <= 1


@pytest.mark.usefixtures("silence_is_safe")
def test_a_timeout_ends_a_run_whose_node_says_nothing(ask: Ask, ollama: FakeNode) -> None:
    ollama.behave = "hangs"
    result = run("llm.generate", {"prompt": PROMPT}, timeout_sec=1, max_attempts=1)
    assert (result.status, result.runs[0].end) == ("failed", "timeout")
    assert not ollama.questions or ollama.hung_up.wait(PATIENCE)
