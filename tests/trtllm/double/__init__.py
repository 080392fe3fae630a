"""A double of TensorRT-LLM's PyTorch executor, as far as a KV cache connector can see it.

TensorRT-LLM cannot be installed where these tests run. The double makes the same calls in the same order with
the same values, and has real tensors underneath: the model's KV bytes depend on the whole prefix, and every
byte that a forward pass reads is checked first. What would end the real executor's loop raises
``DoubleFailure``.

    def job(rank: int, prompt: list[int]) -> dict[int, list[int]]:
        from kvbm_trtllm.leader import Leader    # inside the job: sees the version's base classes
        from kvbm_trtllm.worker import Worker

        executor = Executor(Leader, Worker, ExecutorConfig(manager="v1", overlap=True))
        first = executor.submit(prompt, 8)
        executor.run_until_idle()
        executor.drop_device_cache()             # from here on only the connector can bring blocks back
        again = executor.submit(prompt, 8, cache_salt="tenant")
        executor.run_until_idle()
        assert executor.calls.named("get_num_new_matched_tokens")[-1].result[0] > 0
        executor.close()
        return executor.outputs

    with World("released", num_ranks=2) as world:
        outputs = world.run(job, list(range(40)))

What is what:

* ``World``: rank processes with a ``tensorrt_llm`` of version "early" (1.1.0rc5 to 1.2.0rc1), "released"
(1.2), "mid"
  (main, mid-2026) or "newest" (main, September 2026); with one rank, this process. ``installed(version)``
  alone does only the import side.
* ``ExecutorConfig``: V1 or V2 cache, overlap, chunks, CUDA graphs, attention windows, attention DP, sizes.
* ``Executor``: ``submit``, ``cancel``, ``preempt``, ``fail_next_forward``, ``drop_next_batch``,
  ``drop_device_cache``, ``step``, ``run_until_idle``; ``outputs``, ``finish_reasons``, ``errors``, ``calls``,
  ``blocks_in_use``.
* ``calls``: every call with its values; see ``Call``.

With ``KVBM_TRTLLM_SOURCE`` the connector's manager, its base classes and the V2 layout are TensorRT-LLM's
own: see ``source``.

Where the double is not the real executor: cancellations take effect in every iteration, while R waits for a
batch; after a forward error the loop lives on with overlap too; without ``sleeps`` an idle ``step`` polls.
Not there: pipeline parallelism, beams, draft tokens, several pools per V1 cache.
"""

from tests.trtllm.double.calls import Call, Calls
from tests.trtllm.double.config import ExecutorConfig
from tests.trtllm.double.contract import EARLY, MID, NEWEST, RELEASED, installed
from tests.trtllm.double.executor import Executor, ForwardError
from tests.trtllm.double.failure import DoubleFailure
from tests.trtllm.double.world import World

__all__ = [
    "EARLY",
    "MID",
    "NEWEST",
    "RELEASED",
    "Call",
    "Calls",
    "DoubleFailure",
    "Executor",
    "ExecutorConfig",
    "ForwardError",
    "World",
    "installed",
]
