"""Facts about the GPU machine, for the head of the report. Nothing here needs more than the standard
library.
"""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FIELDS = {
    "GPU": "name",
    "GPU memory": "memory.total",
    "driver": "driver_version",
    "PCIe generation": "pcie.link.gen.max",
    "PCIe lanes": "pcie.link.width.current",
    "PCI address": "pci.bus_id",
}
PACKAGES = ("torch", "triton", "cuda-bindings", "vllm", "numpy")


def gpu_machine_facts() -> dict[str, str]:
    """What a reader needs to judge figures by; what cannot be found out is left out."""
    facts = _gpu()
    cpuinfo = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    facts["CPU"] = next(
        (line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), ""
    )
    facts["cores"] = str(len(os.sched_getaffinity(0)))
    facts["memory"] = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 1e9:.0f} GB"
    facts["kernel"], facts["Python"] = platform.release(), platform.python_version()
    facts["load average"] = " ".join(f"{load:.2f}" for load in os.getloadavg())
    for package in PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            facts[package] = "not installed"
    return {name: fact for name, fact in facts.items() if fact}


def _gpu() -> dict[str, str]:
    query = ["nvidia-smi", f"--query-gpu={','.join(FIELDS.values())}", "--format=csv,noheader", "--id=0"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {"GPU": "none"}
    facts = dict(zip(FIELDS, (value.strip() for value in result.stdout.split(",")), strict=False))
    address = facts.get("PCI address", "").lower()[
        -12:
    ]  # the tool writes the domain with eight digits, the kernel with four
    node = Path("/sys/bus/pci/devices", address, "numa_node")
    if address and node.exists():
        facts["NUMA node of the GPU"] = node.read_text().strip()
    return facts
