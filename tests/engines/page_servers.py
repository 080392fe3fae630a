"""Servers that pages start, on a reader's machine (tests/engines/reader.py), and what is run beside them."""

from __future__ import annotations

import json
import subprocess

from tests.engines.reader import Reader

SMALLER = {"CPU_CACHE_GB=20": "CPU_CACHE_GB=1", '"cpu_cache_gb":20': '"cpu_cache_gb":1', "_GB=100": "_GB=1"}
"""Of what pages say: test machines are small."""
START_S, STOP_S = 1200, 120
_SERVE = """
serve() {{
{lines}
}}
set -m
serve </dev/null >server.log 2>&1 &
server=$!
set +m
trap 'tail -n 60 server.log >&2' ERR
set -eu -o pipefail
export no_proxy='*'
until curl -sf localhost:{port}/health >/dev/null; do
    kill -0 $server
    test $SECONDS -lt {start_s}
    sleep 0.5
done
ask() {{
    curl -sSf localhost:{port}/v1/chat/completions -H 'Content-Type: application/json' \\
        -H 'X-Request-Id: 7f3' -d @prompt.json >answer.json
    grep -q completion_tokens answer.json
}}
until ask; do test $SECONDS -lt {start_s}; sleep 0.5; done  # Dynamo's frontend is there before its workers
kvbm fleet status
{beside}
trap - ERR
kill -TERM -- -$server
deadline=$((SECONDS + {stop_s}))
while kill -0 -- -$server 2>/dev/null; do
    test $SECONDS -lt $deadline || {{ echo "the server goes on" >&2; exit 8; }}
    sleep 0.5
done
"""


def beside_server(
    reader: Reader, lines: str, *, port: int, model: str, beside: str = ""
) -> subprocess.CompletedProcess[str]:
    """``lines`` serve, a prompt is answered, ``beside`` runs, and they end."""
    content = "The quick brown fox jumps over the lazy dog. " * 200
    prompt = {"model": model, "max_tokens": 10, "messages": [{"role": "user", "content": content}]}
    (reader.home / "prompt.json").write_text(json.dumps(prompt))
    for large, small in SMALLER.items():
        lines = lines.replace(large, small)
    script = _SERVE.format(lines=lines, port=port, beside=beside, start_s=START_S, stop_s=STOP_S)
    return reader.work(script, {"PYTHONUNBUFFERED": "1"})
