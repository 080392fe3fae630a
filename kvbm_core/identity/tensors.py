"""Whether the tensors of models in this process are still those of before: a digest of all of them.

A model's own ``load_weights`` is watched as well. Other writes leave no trace but the bytes: loaders write
through ``param.data``, which counts no version.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from enum import Enum
from functools import wraps
from typing import TYPE_CHECKING, Any

import xxhash

from kvbm_core.identity.digest import yield_to_others

if TYPE_CHECKING:
    import torch

log = logging.getLogger("kvbm")

AT_ONCE_BYTES = 256 << 20
"""Tensors of so much are looked at while the engine waits: about 50 ms."""
CHUNK_BYTES = 16 << 20


class Seen(str, Enum):
    """What ``Watched.look`` has found."""

    SAME = "same"
    OTHERS = "others"
    """Or nobody knows."""
    LATER = "later"


class _StoppedError(Exception):
    """Nobody wants to know any more."""


class Watched:
    """Models of this process. ``on_load``: called before weights go to one of them by its ``load_weights``;
    perhaps one tensor after the other. One thread at a time.
    """

    def __init__(self, models: Iterable[torch.nn.Module], on_load: Callable[[], None]) -> None:
        models = list(models)
        self._models = [weakref.ref(model) for model in models]
        self._generation = self._number = -1
        self._is_loaded_anew = False
        self._then = self._now = _Look(self._tensors)
        for model in models:
            self._watch(model, on_load)

    def look(self, generation: int, now: int) -> Seen:
        """Whether the tensors are still those with which ``generation`` began. The first question of a
        generation begins it, and its answer is OTHERS. A large model is looked at in a thread: LATER, until
        it is done; in its first generation alone, as who changes weights once does it again. ``now``: the
        generation that they may be of.
        """
        if generation != self._generation:
            self.rest()
            self._generation, self._number, self._is_loaded_anew = generation, now, False
            self._then = self._now = self._begin(in_thread=not generation)
            return Seen.OTHERS
        if self._is_loaded_anew or self._then.found is None:
            self.rest()
            return Seen.OTHERS
        if now != self._number or self._now.is_stopped:
            self._now.stop()
            self._now, self._number = self._begin(in_thread=True), now
        if not self._now.is_over.is_set():
            return Seen.LATER
        return Seen.SAME if self._now.found == self._then.found else Seen.OTHERS

    def rest(self) -> None:
        """The tensors' memory is about to be unmapped, or nobody asks again: no thread reads it any more."""
        for one in (self._then, self._now):
            one.stop()

    def _begin(self, *, in_thread: bool) -> _Look:
        import torch

        tensors = list(self._tensors())
        devices = {tensor.device for _, tensor in tensors if tensor.device.type == "cuda"}
        for device in devices:  # what other streams were told to write is there
            torch.cuda.synchronize(device)
        one = _Look(self._tensors)
        if sum(tensor.nbytes for _, tensor in tensors) <= AT_ONCE_BYTES:
            one.run()
        elif in_thread:
            one.start()
        return one

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, model in enumerate(reference() for reference in self._models):
            if model is None:
                raise _StoppedError
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                yield f"{number} {name}", tensor.detach()

    def _watch(self, model: Any, on_load: Callable[[], None]) -> None:
        load = getattr(model, "load_weights", None)
        if load is None:
            return
        myself = weakref.ref(self)

        @wraps(load)
        def watched(*args: Any, **kwargs: Any) -> Any:
            mine = myself()
            if mine is not None:
                mine._is_loaded_anew = True
            on_load()
            return load(*args, **kwargs)

        model.load_weights = watched


class _Look:
    """A digest of tensors, made at once or in a thread of low priority. ``found``: it, once there is one."""

    def __init__(self, tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]]) -> None:
        self.found: str | None = None
        self.is_over = threading.Event()
        self.is_stopped = False
        self._tensors = tensors
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Makes the digest."""
        try:
            self.found = digest_of(self._tensors(), lambda: self.is_stopped)
        except _StoppedError:
            pass
        except Exception:
            log.debug("kvbm: the model's tensors cannot be looked at", exc_info=True)
        self.is_over.set()

    def start(self) -> None:
        """As ``run``, in a thread."""
        self._thread = threading.Thread(target=self._run_beside, name="kvbm-tensors", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Nobody wants to know any more. What was found stays."""
        if self.found is None:
            self.is_stopped = True
            if self._thread is not None:
                self._thread.join()

    def _run_beside(self) -> None:
        yield_to_others()
        self.run()


def digest_of(tensors: Iterable[tuple[str, torch.Tensor]], is_stopped: Callable[[], bool]) -> str:
    """Names, shapes, number formats and bytes of all."""
    whole, seen = xxhash.xxh3_128(), set[int]()
    for name, tensor in _plain(tensors):
        place = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
        whole.update(f"{name} {tensor.dtype} {place}\n".encode())
        memory = tensor.untyped_storage()
        if tensor.device.type == "meta" or not memory.nbytes() or memory.data_ptr() in seen:
            continue
        seen.add(memory.data_ptr())
        for chunk in _chunks(tensor):
            if is_stopped():
                raise _StoppedError
            whole.update(chunk)
    return whole.hexdigest()


def _plain(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of which others are made, as quantized ones are."""
    for name, tensor in tensors:
        flatten = getattr(tensor, "__tensor_flatten__", None)
        if flatten is None:
            yield name, tensor
        else:
            yield from _plain((f"{name}.{part}", getattr(tensor, part)) for part in flatten()[0])


def _chunks(tensor: torch.Tensor) -> Iterator[Any]:
    """The whole memory that the tensor lies in; another device's by way of a small buffer of the host."""
    import torch

    memory = tensor.untyped_storage()
    if not memory.data_ptr():
        raise RuntimeError("a tensor without memory")
    with torch.inference_mode():
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
    device = flat.device.type
    if device == "cpu":
        yield from (part.numpy() for part in flat.split(CHUNK_BYTES))
        return
    is_cuda = device == "cuda"  # and perhaps not the device of this thread, which is the first
    with torch.cuda.device(flat.device) if is_cuda else nullcontext():
        staging = torch.empty(min(CHUNK_BYTES, len(flat)), dtype=torch.uint8, pin_memory=is_cuda)
        beside = torch.cuda.stream(torch.cuda.Stream()) if is_cuda else nullcontext()
    for part in flat.split(CHUNK_BYTES):
        here = staging[: len(part)]
        with beside:
            here.copy_(part)  # waits for this stream alone
        yield here.numpy()
