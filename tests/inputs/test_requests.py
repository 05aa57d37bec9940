"""OpenAI batch requests as input."""

from __future__ import annotations

from pathlib import Path

import pytest

from spot_batch.inputs.errors import InputError
from spot_batch.inputs.pin import pin_input, recognised
from spot_batch.inputs.reader import InputReader
from spot_batch.job.reading import load_spec
from spot_batch.job.spec import JobSpec
from tests.jobdir.jobs import make_spec, write_jsonl


def request(custom_id: str, **body: object) -> dict[str, object]:
    """As in vLLM's example file."""
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": "Hello world!"},
    ]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "meta-llama/Meta-Llama-3-8B-Instruct",
            "messages": messages,
            "max_completion_tokens": 1000,
            **body,
        },
    }


def test_requests_are_recognised_and_name_their_own_columns(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "batch.jsonl", [request("request-1"), request("request-2")])
    spec = recognised(make_spec(path))
    assert spec.input.format == "openai-batch"
    assert (spec.input.messages, spec.input.custom_id) == ("messages", "custom_id")
    pinned = pin_input(spec)
    rows = InputReader(pinned).read([1]).table.to_pylist()
    assert rows[0]["custom_id"] == "request-2"
    assert rows[0]["messages"][1] == {"role": "user", "content": "Hello world!"}
    assert rows[0]["max_new_tokens"] == 1000
    other = write_jsonl(tmp_path / "other.jsonl", [{"prompt": "a", "body": {}}])
    assert recognised(make_spec(other)).input.format == "auto"


def test_what_a_request_asks_for_is_used(tmp_path: Path) -> None:
    body = {
        "messages": [{"role": "user", "name": "ann", "content": [{"type": "text", "text": "Hi"}]}],
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 7,
        "stop": "END",
        "stream": False,
        "n": 1,
        "user": "somebody",
        "metadata": {"run": "7"},
        "store": True,
        "service_tier": "flex",
    }
    path = write_jsonl(tmp_path / "batch.jsonl", [request("a", **body)])
    spec = make_spec(path, input__format="openai-batch")
    row = InputReader(pin_input(spec)).read([0]).table.to_pylist()[0]
    assert row["messages"] == [{"role": "user", "content": "Hi"}]
    assert (row["temperature"], row["top_p"], row["seed"], row["stop"]) == (0.5, 0.9, 7, ["END"])


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"tools": [{"type": "function"}]}, "body.tools is not implemented"),
        ({"n": 2}, "body.n is not implemented"),
        ({"response_format": {"type": "json_object"}}, "body.response_format"),
        ({"logprobs": True}, "body.logprobs"),
        ({"chat_template_kwargs": {}}, "body.chat_template_kwargs"),
        ({"max_tokens": 7}, "body.max_tokens and body.max_completion_tokens differ"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": []}]},
            "messages[0].tool_calls",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        ({"max_tokens": 0, "max_completion_tokens": None}, "body.max_tokens must be a whole"),
        ({"max_completion_tokens": 10**6}, "body.max_completion_tokens must be a whole"),
        ({"max_completion_tokens": True}, "got True"),
        ({"temperature": "hot"}, "body.temperature must be a number, got 'hot'"),
        ({"temperature": -1}, "body.temperature must be 0 or from"),
        ({"top_p": 0}, "body.top_p must be from"),
        ({"seed": 2**70}, "body.seed must be a whole number"),
        ({"stop": ["a", ""]}, "body.stop must be texts, none empty"),
        ({"messages": "Hi"}, "body.messages is missing, or no list"),
    ],
)
def test_what_is_not_implemented_is_an_error_of_its_row_that_names_it(
    tmp_path: Path, body: dict[str, object], named: str
) -> None:
    rows = [request("good"), request("bad", **body)]
    pinned = pin_input(make_spec(write_jsonl(tmp_path / "b.jsonl", rows), **FORMAT))
    assert pinned.num_faults == 1
    assert named in pinned.faults[0]
    read = InputReader(pinned).read([0, 1])
    assert list(read.faults) == [1]
    assert (read.faults[1].code, read.faults[1].custom_id) == ("bad_request", "bad")


FORMAT: dict[str, object] = {"input__format": "openai-batch"}


def test_another_method_or_url_is_an_error_of_its_row(tmp_path: Path) -> None:
    rows = [
        request("a"),
        {**request("b"), "url": "/v1/embeddings"},
        {**request("c"), "method": "GET"},
    ]
    pinned = pin_input(make_spec(write_jsonl(tmp_path / "b.jsonl", rows), **FORMAT))
    assert "'/v1/embeddings' is not implemented" in pinned.faults[0]
    assert "'GET' is not implemented" in pinned.faults[1]


def test_an_id_stands_once_also_among_rows_with_faults(tmp_path: Path) -> None:
    rows = [request("a"), request("b"), request("a", tools=[1])]
    path = write_jsonl(tmp_path / "b.jsonl", rows)
    with pytest.raises(InputError, match=r"'a' stands twice .* line 1 and b\.jsonl line 3"):
        pin_input(make_spec(path, **FORMAT))


def test_a_resolved_spec_of_requests_loads_again(tmp_path: Path) -> None:
    spec = load_spec(None, {"input.source": "x.jsonl", "input.format": "openai-batch"})
    assert JobSpec.model_validate(spec.model_dump()) == spec
