"""llama.cpp, through llama-cpp-python's own bindings of its C functions: all prompts in slices of
512 tokens, then one token of each sequence a step."""

from __future__ import annotations

import ctypes

import llama_cpp as ll
from support.contender_decode import Generate, Prompts, Task, measure

SLICE = 512


class Llama:
    def __init__(self, task: Task) -> None:
        ll.llama_backend_init()
        self.model = ll.llama_load_model_from_file(
            task.gguf.encode(), ll.llama_model_default_params()
        )
        many = len(task.prompts)
        params = ll.llama_context_default_params()
        params.n_ctx = many * (max(map(len, task.prompts)) + task.new + 64)
        params.n_batch = params.n_ubatch = SLICE
        params.n_seq_max = many
        params.n_threads = params.n_threads_batch = task.threads
        self.context = ll.llama_new_context_with_model(self.model, params)
        self.batch = ll.llama_batch_init(SLICE, 0, many)
        self.sampler = ll.llama_sampler_init_greedy()

    def generate(self, prompts: Prompts, count: int) -> list[list[int]]:
        ll.llama_memory_clear(ll.llama_get_memory(self.context), True)
        found: list[list[int]] = [[] for _ in prompts]
        fed = [
            (token, place, number, place == len(ids) - 1)
            for number, ids in enumerate(prompts)
            for place, token in enumerate(ids)
        ]
        for at in range(0, len(fed), SLICE):
            self._step(fed[at : at + SLICE], found)
        for step in range(count - 1):
            self._step(
                [(one[-1], len(prompts[i]) + step, i, True) for i, one in enumerate(found)], found
            )
        return found

    def _step(self, fed: list[tuple[int, int, int, bool]], found: list[list[int]]) -> None:
        batch = self.batch
        batch.n_tokens = len(fed)
        for row, (token, place, number, last) in enumerate(fed):
            batch.token[row], batch.pos[row], batch.logits[row] = token, place, last
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = number
        failed = ll.llama_decode(self.context, batch)
        assert not failed, failed
        for row, (_, _, number, last) in enumerate(fed):
            if last:
                found[number].append(ll.llama_sampler_sample(self.sampler, self.context, row))


def make(task: Task) -> Generate:
    quiet = ll.llama_log_callback(lambda level, text, data: None)
    ll.llama_log_set(quiet, ctypes.c_void_p())
    made = Llama(task)
    made.quiet = quiet  # type: ignore[attr-defined]  # kept as long as it may be called
    return made.generate


if __name__ == "__main__":
    measure(make)
