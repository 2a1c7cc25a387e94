"""`prefix-router tokens` and `prefix-router doctor --tokens`, as people call them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from litellm_prefix_router.cli.app import app
from litellm_prefix_router.prompt.encoded import PromptUnknown
from litellm_prefix_router.prompt.pipeline import PromptPipeline
from litellm_prefix_router.settings import ModelSettings, SettingsError

from .recordings import REPOSITORY

TINY = REPOSITORY / "litellm_prefix_router" / "sim" / "assets" / "tiny"


def tokens(*lines: bytes, options: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    raw = b"\n".join(lines) + b"\n"
    result = CliRunner().invoke(app, ["tokens", "--model", str(TINY), *options], input=raw)
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_tokens_prints_a_line_for_a_line() -> None:
    body = {"messages": [{"role": "user", "content": "hello " * 40}], "model": "sql", "cache_salt": "s"}
    good, bad, broken = tokens(
        json.dumps(body).encode(), b'{"messages": []}', b"{nope", options=("--lora-module", "sql", "--block-size", "8")
    )
    assert good["blocks"] == len(good["ids"]) // 8 and good["source"] in ("fastokens", "tokenizers")
    assert good["identity"] == {"lora": "sql", "cache_salt": "s"}
    assert bad["error"].startswith("refused") and broken["error"].startswith("malformed")


def test_tokens_reads_json_as_the_engines_parser_does() -> None:
    text = '{"messages":[{"role":"user","content":"x","content":"y"}],"top_p":NaN}'
    plain = b'{"messages":[{"role":"user","content":"y"}]}'
    answers = tokens(plain, text.encode(), b"\xef\xbb\xbf" + plain)
    assert len({json.dumps(answer["ids"]) for answer in answers}) == 1
    assert tokens(plain.decode().encode("utf-16"))[0]["ids"] == answers[0]["ids"]


def test_tokens_options() -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"}).encode()
    assert "error" in tokens(body)[0]
    assert "ids" in tokens(body, options=("--trust-request-chat-template",))[0]
    dated = ("--chat-template", "{{ strftime_now('%Y') }}", "--now", "1999-01-01")
    plain = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()
    completion = tokens(b'{"prompt": "1999", "add_special_tokens": false}', options=("--path", "/v1/completions"))
    assert tokens(plain, options=dated)[0]["ids"] == completion[0]["ids"]


def test_a_wrong_option_is_one_line() -> None:
    for options in (["--model", "/nowhere"], ["--model", str(TINY), "--now", "yesterday"]):
        result = CliRunner().invoke(app, ["tokens", *options], input="")
        assert isinstance(result.exception, SettingsError) and "\n" not in str(result.exception)


class Replica(BaseHTTPRequestHandler):
    """/tokenize of an engine that uses our own tokenizer, and gets one rule wrong if told to."""

    pipeline = PromptPipeline(ModelSettings(tokenizer=str(TINY)))
    wrong = False

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer({"data": [{"id": "m", "root": str(TINY), "max_model_len": 4096}]})
        else:
            self._answer({"version": "0.32.0"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/detokenize":
            self._answer({"prompt": "..."})
            return
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        try:
            ids = self.pipeline.encode_now(path, body).token_ids.tolist()
        except PromptUnknown:
            self._answer({}, 400)
            return
        self._answer({"tokens": ids[1:] if self.wrong and "tools" in body else ids})

    def _answer(self, value: Any, status: int = 200) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def replica() -> Iterator[str]:
    Replica.pipeline.load()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Replica)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()
    Replica.wrong = False


def test_doctor_finds_nothing_where_all_is_well(replica: str) -> None:
    result = CliRunner().invoke(app, ["doctor", "--tokens", replica])
    assert result.exit_code == 0 and "no differences" in result.output


def test_doctor_shows_each_difference_in_context(replica: str) -> None:
    Replica.wrong = True
    result = CliRunner().invoke(app, ["doctor", "--tokens", replica])
    assert result.exit_code == 1
    assert "2 differences" in result.output and "the first difference is at 0" in result.output


def test_doctor_without_a_replica() -> None:
    result = CliRunner().invoke(app, ["doctor", "--tokens", "http://127.0.0.1:9"])
    assert isinstance(result.exception, SettingsError)
