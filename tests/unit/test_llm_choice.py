"""llm.generate: its pure decisions."""

from pathlib import Path
from typing import Any

import pytest

from dataloader.config import CATEGORIES, Settings
from dataloader.pipelines import PermanentError, validated
from dataloader.pipelines.llm import (
    Arguments,
    Node,
    addresses,
    busy,
    candidates,
    is_echo,
    patterns,
    question,
    timeout_factor,
)

BIG = Node("ollama", "http://big:11434", ("nomic-embed-text:latest", "deepseek-r1:70b", "qwen2.5-coder:32b"))
SMALL = Node("ollama", "http://small:11434", ("qwen2.5-coder:7b", "llama3.2:3b", "mistral:latest"))
MAC = Node("mlx", "http://mac:11435", ("mlx-community/Qwen2.5-Coder-14B-Instruct-4bit", "mlx-community/Llama-3.2-1B"))
NODES = [BIG, SMALL, MAC]


def wanted(**args: Any) -> Arguments:
    return validated(Arguments, {"prompt": "Why?"} | args)


def chosen(nodes: list[Node], **args: Any) -> list[tuple[str, str]]:
    return [(node.name, model) for node, model in candidates(nodes, patterns(wanted(**args), CATEGORIES))]


def test_a_named_model_is_asked_of_the_nodes_that_have_it() -> None:
    assert chosen(NODES, model="qwen2.5-coder:32b") == [("http://big:11434", "qwen2.5-coder:32b")]
    assert chosen(NODES, model="mistral") == [("http://small:11434", "mistral:latest")]
    assert chosen(NODES, model="qwen2.5-coder") == []
    assert chosen(NODES, model="nomic-embed-text") == [("http://big:11434", "nomic-embed-text:latest")]


def test_a_category_takes_the_best_pattern_of_each_node_and_the_order_of_the_settings() -> None:
    assert chosen(NODES, category="coding") == [
        ("http://big:11434", "qwen2.5-coder:32b"),
        ("http://small:11434", "qwen2.5-coder:7b"),
        ("http://mac:11435", "mlx-community/Qwen2.5-Coder-14B-Instruct-4bit"),
    ]
    of_mac, of_small = "mlx-community/Qwen2.5-Coder-14B-Instruct-4bit", "llama3.2:3b"
    for category, models in (
        ({"category": "reasoning"}, ["deepseek-r1:70b", "qwen2.5-coder:7b"]),
        ({"category": "fast"}, [of_small, "mlx-community/Llama-3.2-1B", "deepseek-r1:70b"]),
        ({}, [of_mac, of_small, "qwen2.5-coder:32b"]),
    ):
        assert [model for _, model in chosen(NODES, **category)][: len(models)] == models
    embedding = Node("ollama", "http://n", ("nomic-embed-text:latest", "bge-m3:latest"))
    assert chosen([embedding]) == [], "no embedding model is taken unless it is named"


def test_a_model_in_memory_comes_first_unless_a_pattern_speaks_against_it() -> None:
    warm = Node("ollama", "http://warm", ("a-coder:7b", "b-coder:7b"), loaded=frozenset({"b-coder:7b"}))
    cold = Node("ollama", "http://cold", ("a-coder:7b",))
    assert chosen([cold, warm], category="coding") == [("http://warm", "b-coder:7b"), ("http://cold", "a-coder:7b")]
    other = Node("ollama", "http://other", ("llama3.2:3b",), loaded=frozenset({"llama3.2:3b"}))
    assert chosen([other, cold], category="coding")[0] == ("http://cold", "a-coder:7b")


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"queue_percent": 91}, "its queue is at 91 %, above 90 %"),
        ({"queue": 100, "cpu": 5}, "its queue is at 100 %, above 90 %"),
        ({"ram_percent": 95.4}, "its RAM is at 95 %, above 90 %"),
        ({"memory_percent": 99, "cpu_percent": 10}, "its RAM is at 99 %, above 90 %"),
        ({"cpu_percent": 90.6}, "its CPU is at 91 %, above 90 %"),
        ({"active_requests": 2, "max_concurrency": 2}, "it has 2 of 2 requests in flight"),
        ({"queue_percent": 90, "ram_percent": 90, "cpu_percent": 90}, None),
        ({"active_requests": 1, "max_concurrency": 2}, None),
        ({"status": "ok"}, None),
        ({"cpu_percent": True, "ram_percent": "99"}, None),
        (["cpu_percent"], None),
        (None, None),
    ],
)
def test_a_node_above_the_limit_is_busy(status: Any, why: str | None) -> None:
    assert busy(status, 90) == why


@pytest.mark.parametrize(
    ("answer", "is_one"),
    [
        ("Why is the sky blue?", True),
        ('  "why is the SKY blue" ', True),
        ("Why is the sky blue? Why is the sky blue?", True),
        ("Be short. Why is the sky blue?", True),
        ("Why is the sky blue? Because of Rayleigh.", False),
        ("The sky", False),
        ("Be short.", False),
        ("", False),
    ],
)
def test_an_answer_of_nothing_but_the_prompt_is_an_echo(answer: str, is_one: bool) -> None:
    assert is_echo(answer, "Why is the sky blue?", "Be short.") is is_one


@pytest.mark.parametrize(
    ("model", "factor"),
    [
        ("qwen2.5-coder:32b", 1.5),
        ("mlx-community/Llama-3.3-70B-Instruct-4bit", 1.5),
        ("qwen3:235b-a22b", 1.5),
        ("qwen2.5:1.5b", 1.0),
        ("qwen3:30b-a3b", 1.0),
        ("some-model-32bit", 1.0),
        ("mixtral-v0.32b7", 1.0),
        ("mistral", 1.0),
        (None, 1.0),
    ],
)
def test_a_model_from_32_billion_parameters_on_takes_half_as_long_again(model: str | None, factor: float) -> None:
    assert timeout_factor(model) == factor


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"prompt": " \n"}, "prompt: should not be blank"),
        ({"model": "a:1b", "category": "fast"}, "category: should not stand beside model: name one of them"),
        ({"category": "cheap"}, "category: Input should be 'reasoning', 'coding', 'fast' or 'default'"),
        ({"model": "../../etc/passwd"}, "model: should be a model's name such as qwen2.5-coder:32b"),
        ({"model": "a/../b"}, "model: should be a model's name"),
        ({"model": "http://10.0.0.1/x"}, "model: should be a model's name"),
        ({"model": "a*"}, "model: should be a model's name"),
        ({"options": {"draft_model": "x"}}, "options.draft_model: there is no such argument"),
        ({"host": "http://10.0.0.1"}, "host: there is no such argument; there are prompt, system, model, category"),
    ],
)
def test_a_wrong_argument_is_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(PermanentError) as caught:
        wanted(**args)
    assert str(caught.value).startswith(message)


def test_a_question_to_an_mlx_node_has_the_names_of_its_protocol() -> None:
    asked = wanted(system="Be short.", max_tokens=9, options={"temperature": 0, "repeat_penalty": 1.1, "num_ctx": 512})
    assert question(MAC, "m", asked) == {
        "model": "m",
        "messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
        "repetition_penalty": 1.1,
        "max_tokens": 9,
    }


def test_the_nodes_are_those_of_the_settings_each_once() -> None:
    settings = Settings.model_construct(
        ollama_api_url=("http://a:1/api", "http://b:2/"),
        ollama_base_url=("http://a:1", "http://gate/ollama/"),
        mlx_api_url=("http://c:3/v1",),
    )
    assert addresses(settings) == [
        ("ollama", "http://a:1"),
        ("ollama", "http://b:2"),
        ("ollama", "http://gate/ollama"),
        ("mlx", "http://c:3"),
    ]


@pytest.mark.parametrize(
    ("mark", "host"),
    [(None, "localhost"), (".dockerenv", "host.docker.internal"), ("run/.containerenv", "host.docker.internal")],
)
def test_without_a_setting_the_nodes_are_those_of_this_machine(tmp_path: Path, mark: str | None, host: str) -> None:
    if mark:
        (tmp_path / mark).parent.mkdir(exist_ok=True)
        (tmp_path / mark).touch()
    settings = Settings.model_construct(ollama_api_url=(), ollama_base_url=(), mlx_api_url=())
    assert addresses(settings, tmp_path) == [("ollama", f"http://{host}:11434"), ("mlx", f"http://{host}:11435")]
