"""The command line: results on stdout, errors as one line, files that are gone on with."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cpu_kernels.build import find_compiler
from server.cli import main
from tests.support.engines import DATA, tiny_engine

ROOT = Path(__file__).resolve().parents[2]
TINY = [str(DATA / "models" / "tiny"), "--tokenizer", str(DATA / "tiny_tokenizer"), "--max-model-len", "256"]
COMMANDS = ("serve", "generate", "chat", "devices", "doctor", "verify", "bench")


def jumar(*arguments: str, stdin: str = "", env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), input=stdin, env=env, prog_name="jumar")


def test_every_command_has_help() -> None:
    top = jumar("--help")
    assert top.exit_code == 0
    for name in COMMANDS:
        assert name in top.stdout
        text = jumar(name, "--help").stdout
        assert text.startswith("Usage: jumar " + name)
        assert len(text.splitlines()) > 5


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "bench"])
def test_settings_are_options(command: str) -> None:
    text = jumar(command, "--help").stdout
    for option in ("--device", "--max-num-seqs", "--kv-share", "--speculate", "--config"):
        assert option in text
    assert ("--api-key" in text) == (command == "serve")


def test_print_config_says_where_values_came_from(tmp_path: Path) -> None:
    file = tmp_path / "jumar.toml"
    file.write_text('max_num_seqs = 3\nhost = "127.0.0.1"\n')
    done = jumar(
        "serve", "model", "--config", str(file), "--port", "9", "--print-config", env={"JUMAR_DRAIN_TIMEOUT": "5s"}
    )
    assert done.exit_code == 0, done.output
    lines = {line.split(" =")[0]: line for line in done.stdout.splitlines() if " = " in line}
    assert "9" in lines["port"] and "command line --port" in lines["port"]
    assert "jumar.toml line 1" in lines["max_num_seqs"]
    assert "5.0" in lines["drain_timeout"] and "JUMAR_DRAIN_TIMEOUT" in lines["drain_timeout"]
    assert "default" in lines["block_size"]


@pytest.mark.parametrize(("arguments", "words"), [
    (["serve"], "no model given"), (["serve", "/no/such/model", "--port", "0"], "/no/such/model"),
    (["serve", *TINY, "--port", "x"], "--port"), (["serve", *TINY, "--host", "0.0.0.0"], "API key"),
    (["serve", *TINY, "--device", "tpu"], "tpu"), (["generate", "/no/such/model", "hi"], "/no/such/model"),
    (["generate", *TINY, "hi", "--temperature", "9"], "temperature"),
    (["serve", *TINY, "--config", "/no/such.toml"], "/no/such.toml"),
])  # fmt: skip
def test_errors_are_one_line(arguments: list[str], words: str) -> None:
    done = jumar(*arguments)
    assert done.exit_code == 1
    assert done.stdout == "" and "Traceback" not in done.stderr
    *notices, last = done.stderr.splitlines()
    assert last.startswith("Error: ") and words in last and not any("Error" in notice for notice in notices)


@pytest.mark.parametrize("arguments", [
    ["nonsense"], ["serve", "--no-such-option"], ["generate", *TINY], ["generate", *TINY, "a", "--prompt", "b"],
    ["generate", *TINY, "--input", str(ROOT / "pyproject.toml")],
    ["generate", *TINY, "--input", "/no", "--output", "x"],
])  # fmt: skip
def test_wrong_usage_is_exit_code_2(arguments: list[str]) -> None:
    done = jumar(*arguments)
    assert done.exit_code == 2 and "Error: " in done.stderr


def test_an_error_of_ours_is_one_line_and_debug_shows_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("server.commands.serve.format_config", broken)
    done = jumar("serve", "m", "--print-config")
    assert done.exit_code == 1
    assert (
        done.stderr.startswith("Error: internal error: ZeroDivisionError: oops") and len(done.stderr.splitlines()) == 1
    )
    assert isinstance(jumar("--debug", "serve", "m", "--print-config").exception, ZeroDivisionError)


def test_generate_continues_a_prompt() -> None:
    greedy = [*TINY, "--temperature", "0", "--max-tokens", "9"]
    done = jumar("generate", *greedy, "--prompt", "The cat")
    assert done.exit_code == 0, done.output
    engine = tiny_engine(dtype="float32")
    from runtime.api import SamplingParams

    try:
        wanted = engine.generate("The cat", SamplingParams(max_tokens=9, temperature=0.0))[0].text
    finally:
        engine.shutdown()
    assert done.stdout == wanted + "\n"
    assert jumar("generate", greedy[0], "The cat", *greedy[1:]).stdout == done.stdout
    assert jumar("generate", *greedy, "--prompt", "-", stdin="The cat").stdout == done.stdout
    stop = wanted[3:5]
    assert jumar("generate", *greedy, "--prompt", "The cat", "--stop", stop).stdout == wanted.split(stop)[0] + "\n"


# ---------------------------------------------------------------- files of requests


def line(custom_id: Any, url: str = "/v1/completions", **body: Any) -> str:
    body = {"prompt": f"prompt {custom_id}", "max_tokens": 5, "seed": 1, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def content(answer: dict[str, Any]) -> Any:
    """What does not change from run to run."""
    return answer["custom_id"], answer["response"]["status_code"], answer["response"]["body"].get("choices")


def test_a_file_is_answered_in_order_and_gone_on_with(tmp_path: Path) -> None:
    requests, output = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    # the first answers are long, the last short: order is that of the file all the same
    lines = [line(f"id-{i}", max_tokens=40 - 2 * i) for i in range(18)]
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 2}
    lines.append(json.dumps({"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat}))
    requests.write_text("\n".join(lines) + "\n\n")
    run = ["generate", *TINY, "--max-num-seqs", "2", "--input", str(requests), "--output", str(output)]
    done = jumar(*run)
    assert done.exit_code == 0, done.output
    assert "19 answered, 0 failed, 0 were answered already" in done.stderr
    full = answers(output)
    assert [a["custom_id"] for a in full] == [f"id-{i}" for i in range(18)] + ["chat"]
    assert all(set(a) == {"id", "custom_id", "response", "error"} and a["error"] is None for a in full)
    assert full[-1]["response"]["body"]["object"] == "chat.completion"
    assert full[0]["response"]["body"]["usage"]["completion_tokens"] == 40

    raw = output.read_bytes()
    cut = raw.index(b"\n", len(raw) // 2) + 1
    kept = raw[:cut].count(b"\n")
    for torn in (b"", b'{"id": "batch_req_', raw[cut : cut + 400].split(b"\n")[0][:-1]):
        output.write_bytes(raw[:cut] + torn)
        done = jumar(*run)
        assert done.exit_code == 0, done.output
        assert f"{19 - kept} answered, 0 failed, {kept} were answered already" in done.stderr
        assert output.read_bytes()[:cut] == raw[:cut], "what was complete is not touched"
        assert [content(a) for a in answers(output)] == [content(a) for a in full]
    assert "0 answered, 0 failed, 19 were answered already" in jumar(*run).stderr


def test_failures_are_lines(tmp_path: Path) -> None:
    requests, output = tmp_path / "in", tmp_path / "out"
    lines = [
        line("good"), "not json", "[1]", line("url", url="/v1/embeddings"), line("long", max_tokens=10_000),
        line("hot", temperature=9), line(7), line("streamed", stream=True), line("other", model="gpt-4"),
        json.dumps({"custom_id": "nobody", "url": "/v1/completions"}), line("ids", prompt=[99999]), line("last"),
    ]  # fmt: skip
    requests.write_text("\n".join(lines))
    run = ["generate", *TINY, "--input", str(requests), "--output", str(output)]
    done = jumar(*run)
    assert done.exit_code == 0, done.output
    assert "2 answered, 10 failed" in done.stderr
    found = answers(output)
    assert [a["custom_id"] for a in found] == [
        "good", None, None, "url", "long", "hot", 7, "streamed", "other", "nobody", "ids", "last",
    ]  # fmt: skip
    assert [a["response"]["status_code"] for a in found] == [200, 400, 400, 400, 400, 400, 400, 400, 404, 400, 400, 200]
    for answer in found[1:-1]:
        assert answer["error"]["code"] and answer["error"]["message"]
        assert answer["response"]["body"]["error"]["message"] == answer["error"]["message"]
    assert found[4]["error"]["code"] == "context_length_exceeded"
    assert (
        "12 were answered already" in jumar("generate", *TINY, "--input", str(requests), "--output", str(output)).stderr
    )


@pytest.mark.parametrize("bad", ['"\\ud800"', "NaN", "[Infinity]"])
def test_an_id_that_cannot_be_written_back_fails_its_line_only(tmp_path: Path, bad: str) -> None:
    requests, output = tmp_path / "in", tmp_path / "out"
    requests.write_text("\n".join([line("first"), line("x").replace('"x"', bad, 1), line("last")]))
    run = ["generate", *TINY, "--input", str(requests), "--output", str(output)]
    assert "2 answered, 1 failed" in jumar(*run).stderr
    found = answers(output)
    assert [a["custom_id"] for a in found] == ["first", None, "last"]
    assert found[1]["response"]["status_code"] == 400
    assert "3 were answered already" in jumar(*run).stderr


def test_a_file_of_other_answers_is_not_touched(tmp_path: Path) -> None:
    requests, output = tmp_path / "in", tmp_path / "out"
    requests.write_text(line("a") + "\n" + line("b") + "\n")
    for other in (
        '{"custom_id": "x", "response": {}}\n',
        '{"custom_id": "a", "response": {}}\n{"custom_id": "b", "response": {}}\n{"custom_id": "c", "response": {}}\n',
        "my notes\nand more\n",
        "my notes, one line\n",
        "my notes",
        line("a") + "\n",
        line("a"),
    ):
        output.write_text(other)
        done = jumar("generate", *TINY, "--input", str(requests), "--output", str(output))
        assert done.exit_code == 1 and "--output" in done.stderr
        assert output.read_text() == other


@pytest.mark.parametrize("kind", ["a pipe", "standard input"])
def test_requests_may_come_through_a_pipe(tmp_path: Path, kind: str) -> None:
    text = line("a") + "\n" + line("b") + "\n"
    source = "-"
    if kind == "a pipe":
        source = str(tmp_path / "pipe")
        os.mkfifo(source)
        threading.Thread(target=lambda: Path(source).write_text(text), daemon=True).start()
    done = jumar("generate", *TINY, "--input", source, "--output", str(tmp_path / "out"), stdin=text)
    assert done.exit_code == 0, done.output
    assert [a["custom_id"] for a in answers(tmp_path / "out")] == ["a", "b"]


@pytest.mark.parametrize("kind", ["the input", "a link to the input", "a pipe", "/dev/null", "in no folder"])
def test_an_output_that_cannot_be_gone_on_with_is_refused_before_a_model_is_loaded(tmp_path: Path, kind: str) -> None:
    requests, output = tmp_path / "in", tmp_path / "out"
    requests.write_text(line("a"))
    if kind == "a pipe":
        os.mkfifo(output)
    elif kind == "a link to the input":
        output.symlink_to(requests)
    else:
        output = {"the input": requests, "in no folder": tmp_path / "no" / "out"}.get(kind, Path(kind))
    done = jumar("generate", "/no/such/model", "--input", str(requests), "--output", str(output))
    assert done.exit_code == 1 and len(done.stderr.splitlines()) == 1 and "--output" in done.stderr
    assert requests.read_text() == line("a")


def test_more_choices_at_once_than_the_queue_holds(tmp_path: Path) -> None:
    """A file is not subject to the limit of the queue: nobody would send its lines again."""
    requests, output = tmp_path / "in", tmp_path / "out"
    requests.write_text("\n".join(line(f"{i}", n=8, max_tokens=2) for i in range(12)))
    done = jumar(
        "generate", *TINY, "--max-num-seqs", "4", "--max-queue", "0", "--input", str(requests), "--output", str(output)
    )
    assert "12 answered, 0 failed" in done.stderr


# ---------------------------------------------------------------- chat and bench


def test_chat_remembers_and_forgets() -> None:
    """Two turns, a reset, and the first turn again: its answer is the same, the second's is another."""
    options = [*TINY, "--temperature", "0", "--max-tokens", "6"]
    done = jumar("chat", *options, stdin="hello\nhello\n/reset\nhello\n/quit\n")
    assert done.exit_code == 0, done.output
    assert "tokens/s" in done.stderr
    texts = [part for part in done.stdout.replace("> ", "\n> ").split("\n> ") if part]
    assert texts[0] == texts[2]
    assert texts[0] != texts[1]


def test_chat_says_what_is_not_possible_and_goes_on() -> None:
    done = jumar("chat", *TINY, "--max-tokens", "4", stdin="long " * 500 + "\nhi\n")
    assert done.exit_code == 0, done.output
    assert "not possible" in done.stderr and "context length" in done.stderr
    assert "tokens/s" in done.stderr


def test_bench_prints_and_writes_rows(tmp_path: Path) -> None:
    done = jumar("bench", *TINY, "--repeat", "2", "--tokens", "4", "--json", str(tmp_path / "rows.json"))
    assert done.exit_code == 0, done.output
    assert [text.split(",")[0] for text in done.stderr.splitlines()] == [
        f"loading {TINY[0]}", "measuring prefill255 (1 of 4)", "measuring first_token (2 of 4)",
        "measuring decode (3 of 4)", "measuring batch16 (4 of 4)",
    ]  # fmt: skip
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [row["metric"] for row in rows] == [
        f"{name}:tiny" for name in ("load", "prefill255", "first_token", "decode", "batch16", "memory")
    ]
    for row in rows:
        assert row["ours"] > 0 and row["unit"] and row["metric"] in done.stdout


def test_bench_trace_accounts_for_every_op_of_a_step(tmp_path: Path) -> None:
    bad = jumar("bench", *TINY, "--repeat", "1", "--tokens", "4", "--kernels", "numpy", "--trace")
    assert bad.exit_code != 0 and "does not time the ops of a step" in bad.output + bad.stderr
    if find_compiler() is None:
        pytest.skip("no C++ compiler")
    file = tmp_path / "rows.json"
    done = jumar(
        "bench", *TINY, "--repeat", "1", "--tokens", "4", "--trace", "--kernels", "native", "--json", str(file)
    )
    assert done.exit_code == 0, done.output
    layers = json.loads((Path(TINY[0]) / "config.json").read_text())["num_hidden_layers"]
    rows = {row["metric"]: row for row in json.loads(file.read_text())}
    for step in ("decode", "batch16", "prefill"):
        found = {
            name.split(":")[1].split()[0]: row
            for name, row in rows.items()
            if name.startswith(f"{step}:") and "calls" in row
        }
        assert found["paged_attention"]["calls"] == found["qkv_rope_store"]["calls"] == layers
        assert found["act_linear"]["calls"] == layers and found["act_linear"]["operations"] > 0
        assert found["sample"]["calls"] == 1 and all(row["ours"] > 0 for row in found.values())
        assert step in done.stdout
    # the least work of a step, counted by hand: 16 rows, each with its own multiply-adds
    down = "act_linear"
    one, many = (
        next(row for name, row in rows.items() if name.startswith(f"{s}:{down}")) for s in ("decode", "batch16")
    )
    assert many["operations"] == 16 * one["operations"] and one["bytes"] < many["bytes"] < 16 * one["bytes"]


# ---------------------------------------------------------------- serve, as a process


def test_serve_from_start_to_end(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "server.cli", "serve", *TINY, "--port", "0", "--log-json"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        seen = []
        for text in process.stderr:
            seen.append(text)
            if text.startswith("serving "):
                break
        started = "".join(seen)
        assert "serving tiny on http://127.0.0.1:" in started, started
        assert "device: cpu" in started and "KV pool" in started
        url = seen[-1].split(" on ")[1].split("/v1")[0]
        body = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "ignore_eos": True})
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=20) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 3
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=20)
        assert process.returncode == 0
        assert [json.loads(text)["message"] for text in rest.splitlines() if text.startswith("{")][-1] == "ended"
    finally:
        process.kill()
        process.communicate()
