"""All rows."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, NotShown
from tests.mutants.tables import latest, names, planted, promises, servers, times

MUTANTS: tuple[Mutant, ...] = (
    *names.MUTANTS,
    *times.MUTANTS,
    *servers.MUTANTS,
    *promises.MUTANTS,
    *latest.MUTANTS,
    *planted.MUTANTS,
)

NOT_SHOWN = (
    NotShown(
        "that copies wait for the engine's stream on a GPU",
        "needs a GPU: the double of CUDA stands in; tests/unit/test_broadcast_cuda.py runs on one",
    ),
    NotShown(
        "what TensorRT-LLM itself does with our answers",
        "needs CUDA: its double, or its own Python files (KVBM_TRTLLM_SOURCE), stand in",
    ),
    NotShown(
        "1P1D with the real NixlConnector, and Dynamo's frontend with its vLLM worker",
        "real engines for minutes: tests/e2e/test_disaggregated.py, tests/dynamo/test_serving.py run them, "
        "and the mutants of their parts are among the others",
    ),
    NotShown(
        "SGLang's name of an image has 30 bits only",
        "it is SGLang's; docs/sglang.md says so",
    ),
    NotShown(
        "0.3 s for each GB that a killed engine gives back, 30 to 70 ms of a step, 0.8 of what a disk gives",
        "times of a machine: the mutants are of the cause, the benchmarks have the numbers",
    ),
    NotShown(
        "wheels by cibuildwheel, arm64, and the words of README and docs",
        "no code: tests/unit/test_packaging.py, test_deploy_and_docs.py and test_site.py look at them",
    ),
)
