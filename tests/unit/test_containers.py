"""Container scripts print the commands of the guides, and the Kubernetes files agree with each other and with
kvbm. No daemon and no cluster: what can be linted is.
"""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbm_core.config import KvbmSettings

yaml = pytest.importorskip("yaml", reason="NOT RUN: needs PyYAML, which engines bring")
ROOT = Path(__file__).resolve().parents[2]
CONTAINER, KUBERNETES = ROOT / "container", ROOT / "deploy" / "kubernetes"
FRAMEWORKS = ("vllm", "sglang", "trtllm")
GIB = 1 << 30


def script(name: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a script of container/, with a clean environment."""
    environ = {"PATH": os.environ["PATH"], "HOME": "/nowhere", **environment}
    command = ["bash", str(CONTAINER / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environ)


def dry(name: str, *arguments: str, **environment: str) -> list[str]:
    """The words of the command that it would run."""
    result = script(name, "--dry-run", *arguments, **environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") == 1 and not result.stderr
    return shlex.split(result.stdout)


def after(words: list[str], option: str) -> list[str]:
    """What follows each ``option``."""
    return [words[i + 1] for i, word in enumerate(words) if word == option]


def tool(name: str) -> str:
    """A linter beside this Python, or on the PATH."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"NOT RUN: {name} is not installed")
    return found


# ---------------------------------------------------------------- container/


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_build_is_the_guides_line(framework: str) -> None:
    words = dry("build.sh", "--framework", framework, "--enable-kvbm")
    assert words[:2] == ["docker", "build"] and words[-1] == str(ROOT)
    assert after(words, "--tag") == [f"kvbm-{framework}:latest"]
    (file,) = after(words, "--file")
    assert Path(file).is_file()
    more = (
        "--base-image",
        "x:1",
        "--extras",
        "s3",
        "--tag",
        "a:b",
        "--no-cache",
        "--platform",
        "linux/arm64",
    )
    words = dry("build.sh", "--framework", framework.upper(), *more)
    assert after(words, "--build-arg") == ["BASE_IMAGE=x:1", "EXTRAS=s3"] and after(words, "--tag") == ["a:b"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_run_is_the_guides_line(framework: str) -> None:
    words = dry("run.sh", "--framework", framework, "-it", "--mount-workspace", "--use-nixl-gds")
    assert words[:2] == ["docker", "run"] and words[-2:] == [f"kvbm-{framework}:latest", "bash"]
    assert {"memlock=-1", "nofile=65536:65536"} <= set(after(words, "--ulimit"))
    assert after(words, "--gpus") == ["all"] and after(words, "--cap-add") == ["IPC_LOCK"]
    assert after(words, "-v") == [f"{ROOT}:/workspace", "/run/udev:/run/udev:ro"]
    assert after(words, "-e") == ["NVIDIA_GDS=enabled"] and "-it" in words
    assert dry("run.sh", "--framework", framework, "--", "kvbm", "version")[-2:] == ["kvbm", "version"]
    assert dry("run.sh", "--framework", framework)[-1] == f"kvbm-{framework}:latest"


def test_run_passes_settings_without_their_values(tmp_path: Path) -> None:
    secret = {"DYN_KVBM_OBJECT_SECRET_KEY": "s3cret", "HF_TOKEN": "hf_x", "AWS_SECRET_ACCESS_KEY": "k"}
    settings = {"DYN_KVBM_CPU_CACHE_GB": "4", "DYN_KVBM_DISK_CACHE_DIR": "/elsewhere", "AWS_CA_BUNDLE": "/x"}
    words = dry(
        "run.sh", "--framework", "vllm", "--disk", str(tmp_path), "--gpus", "none", **secret, **settings
    )
    disk = "DYN_KVBM_DISK_CACHE_DIR=/var/cache/kvbm"
    assert sorted(after(words, "-e")) == sorted([*secret, "DYN_KVBM_CPU_CACHE_GB", disk])
    assert not {"s3cret", "hf_x"} & set(re.findall(r"\w+", " ".join(words)))
    assert f"{tmp_path}:/var/cache/kvbm" in after(words, "-v") and "--gpus" not in words


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("build.sh", [], "--framework is missing: vllm, sglang or trtllm"),
        ("build.sh", ["--framework", "jax"], "--framework jax: there are vllm, sglang and trtllm"),
        ("build.sh", ["--framework"], "--framework needs a value"),
        ("build.sh", ["--framwork", "vllm"], "unknown option --framwork"),
        ("run.sh", ["--framework", "vllm", "bash"], "unknown option bash"),
        ("run.sh", ["--framework", "vllm", "--disk", "/nowhere/at/all"], "is no directory of this machine"),
        ("run.sh", ["--framework", "vllm", "--name", ""], "--name needs a value"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(name: str, arguments: list[str], message: str) -> None:
    result = script(name, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr and result.stderr.count("\n") == 1


def test_every_option_of_a_script_is_in_its_help() -> None:
    for name in ("build.sh", "run.sh"):
        text = (CONTAINER / name).read_text(encoding="utf-8")
        options = re.findall(r"^        (--?[a-z][\w-]*)", text, re.M)
        assert len(options) > 5
        shown = script(name, "--help")
        assert shown.returncode == 0 and not shown.stderr
        assert all(option in shown.stdout for option in options if option not in {"-e", "-h"})


def test_shell_scripts_pass_shellcheck() -> None:
    files = [str(path.relative_to(ROOT)) for path in sorted(CONTAINER.glob("*.sh"))]
    result = subprocess.run([tool("shellcheck"), "-x", *files], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


def test_dockerfiles_pass_hadolint() -> None:
    files = [str(path) for path in sorted(CONTAINER.glob("Dockerfile.*"))]
    assert len(files) == len(FRAMEWORKS)
    result = subprocess.run([tool("hadolint"), *files], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_dockerfile_names_what_there_is(framework: str) -> None:
    text = (CONTAINER / f"Dockerfile.{framework}").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (extras,) = re.findall(r"^ARG EXTRAS=(.+)$", text, re.M)
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in extras.split(","))
    (launched,) = re.findall(r'^CMD \["/usr/local/share/kvbm/launch/(.+)"\]$', text, re.M)
    path = ROOT / "deploy" / "launch" / launched
    assert "COPY deploy/launch /usr/local/share/kvbm/launch" in text and os.access(path, os.X_OK)


# ---------------------------------------------------------------- deploy/kubernetes


def documents(path: Path) -> list[dict[str, Any]]:
    """What a YAML file holds."""
    return [one for one in yaml.safe_load_all(path.read_text(encoding="utf-8")) if one]


def kustomization(folder: str) -> dict[str, Any]:
    """One of ours."""
    (found,) = documents(KUBERNETES / folder / "kustomization.yaml")
    return found


def stateful_set() -> dict[str, Any]:
    """The engine's."""
    (found,) = documents(KUBERNETES / "base" / "statefulset.yaml")
    return found


def container() -> dict[str, Any]:
    """Of its pods."""
    (found,) = stateful_set()["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def settings_file() -> dict[str, str]:
    """The variables of base/kvbm.env."""
    lines = (KUBERNETES / "base" / "kvbm.env").read_text(encoding="utf-8").split()
    return dict(line.split("=", 1) for line in lines)


def patched(document: dict[str, Any], operations: list[dict[str, Any]]) -> dict[str, Any]:
    """With a JSON patch. KeyError or IndexError where a path leads nowhere."""
    result = copy.deepcopy(document)
    for operation in operations:
        *parents, last = operation["path"].strip("/").split("/")
        place: Any = result
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        if operation["op"] == "replace":
            assert last in place
        place[last] = operation["value"]
    return result


def check_schema(document: dict[str, Any]) -> None:
    """As the API servers of three releases read it."""
    if importlib.util.find_spec("kubernetes_validate") is None:
        pytest.skip("NOT RUN: kubernetes-validate is not installed")
    import kubernetes_validate

    for version in ("1.29", "1.32", "1.36"):
        kubernetes_validate.validate(document, version, strict=True)


def test_kubernetes_takes_the_files() -> None:
    for path in sorted((KUBERNETES / "base").glob("*.yaml")):
        for document in documents(path):
            if document["kind"] != "Kustomization":
                check_schema(document)


def test_kustomizations_name_what_there_is() -> None:
    for folder in ("base", "monitoring", "example"):
        found = kustomization(folder)
        for name in (*found.get("resources", ()), *found.get("components", ())):
            assert (KUBERNETES / folder / name).exists(), f"{folder}: {name}"
    assert kustomization("monitoring")["kind"] == "Component"  # takes part in others only
    generated = kustomization("base")["configMapGenerator"]
    assert generated == [{"name": "kvbm", "envs": ["kvbm.env"]}]
    assert container()["envFrom"] == [{"configMapRef": {"name": "kvbm"}}]


def test_the_example_changes_what_is_in_the_base() -> None:
    example = kustomization("example")
    assert [image["name"] for image in example["images"]] == [container()["image"]]
    (generator,) = example["configMapGenerator"]
    changed = dict(text.split("=", 1) for text in generator["literals"])
    assert generator["behavior"] == "merge" and changed.keys() <= settings_file().keys()
    (patch,) = example["patches"]
    assert patch["target"] == {"kind": "StatefulSet", "name": stateful_set()["metadata"]["name"]}
    result = patched(stateful_set(), yaml.safe_load(patch["patch"]))
    assert result != stateful_set()
    check_schema(result)
    (engine,) = result["spec"]["template"]["spec"]["containers"]
    assert bytes_of(engine["resources"]["limits"]["memory"]) > float(changed["DYN_KVBM_CPU_CACHE_GB"]) * 1e9


def test_services_and_monitor_find_the_pods() -> None:
    template = stateful_set()["spec"]["template"]
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    services = {one["metadata"]["name"]: one for one in documents(KUBERNETES / "base" / "services.yaml")}
    for service in services.values():
        assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
        assert all(port["targetPort"] in ports for port in service["spec"]["ports"])
        assert all(ports[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    assert stateful_set()["spec"]["selector"]["matchLabels"] == template["metadata"]["labels"]
    assert services[stateful_set()["spec"]["serviceName"]]["spec"]["clusterIP"] == "None"
    (monitor,) = documents(KUBERNETES / "monitoring" / "servicemonitor.yaml")
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    chosen = [one for one in services.values() if wanted <= one["metadata"]["labels"].items()]
    assert len(chosen) == 1  # each pod once
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in [port["name"] for port in chosen[0]["spec"]["ports"]]


def bytes_of(size: str) -> int:
    """Of Kubernetes' Gi."""
    assert size.endswith("Gi")
    return int(size.removesuffix("Gi")) * GIB


def test_settings_fit_the_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings_file()
    ports = {port["name"]: port["containerPort"] for port in container()["ports"]}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = KvbmSettings.from_env()
    own = {name for name in given if "KVBM" in name}
    assert own <= set(KvbmSettings.env_names().values())
    assert not [text for text in settings.warnings if any(f"{name}=" in text for name in own)]
    assert settings.metrics and settings.metrics_port == ports["metrics"]
    assert given["PORT"] == str(ports["api"]) and given["HOST"] == "0.0.0.0"
    spec = stateful_set()["spec"]
    volumes = {one["name"]: one["emptyDir"] for one in spec["template"]["spec"]["volumes"]}
    shared = bytes_of(volumes["shm"]["sizeLimit"])
    limit = bytes_of(container()["resources"]["limits"]["memory"])
    assert settings.cpu_cache_gb is not None and settings.disk_cache_gb is not None
    assert settings.cpu_cache_gb * 1e9 + shared < limit * 0.75  # the rest is the engine's
    claims = {one["metadata"]["name"]: one["spec"] for one in spec["volumeClaimTemplates"]}
    assert settings.disk_cache_gb * 1e9 < bytes_of(claims["kvbm"]["resources"]["requests"]["storage"]) * 0.95
    mounts = {one["name"]: one["mountPath"] for one in container()["volumeMounts"]}
    assert mounts.keys() == claims.keys() | volumes.keys()
    assert settings.disk_cache_dir == mounts["kvbm"] and given["XDG_CACHE_HOME"] == mounts["home"]


def test_the_pod_may_lock_memory_and_its_probes_ask_the_engine() -> None:
    engine = container()
    assert engine["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert engine[probe]["httpGet"] == {"path": "/health", "port": "api"}
    assert '/usr/local/share/kvbm/launch/agg_kvbm.sh "$MODEL"' in engine["command"][-1]
    assert "$" not in settings_file()["MODEL"]


def test_the_page_has_the_commands_of_the_scripts() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("container/")]
    assert len(lines) >= 2
    for line in lines:
        name, *arguments = shlex.split(line.partition("#")[0])
        assert dry(Path(name).name, *arguments)[0] == "docker"
    assert "kubectl apply -k deploy/kubernetes/example" in page
