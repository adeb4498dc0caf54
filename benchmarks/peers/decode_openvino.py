"""OpenVINO GenAI's pipeline of continuous batching over what optimum-intel makes of the weights."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
from support.contender_decode import Generate, Prompts, Task, measure

FORMATS = {"float32": "fp32", "int8": "int8", "int4": "int4"}
GROUPS = {"int4": ["--group-size", "32", "--ratio", "1.0", "--sym"]}


def converted(task: Task) -> Path:
    """The model as OpenVINO has it, made once beside the weights."""
    into = Path(f"{task.weights}-openvino-{task.format}")
    if not into.is_dir():
        command = [
            str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model",
            task.weights, "--task", "text-generation-with-past", "--weight-format",
            FORMATS[task.format], *GROUPS.get(task.format, []), str(into),
        ]  # fmt: skip
        subprocess.run(command, check=True)
    return into


def make(task: Task) -> Generate:
    cache = genai.SchedulerConfig()
    cache.cache_size = 2
    cache.max_num_batched_tokens = 512
    cache.enable_prefix_caching = False
    properties = {
        "INFERENCE_NUM_THREADS": task.threads, "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32" if task.eights else "0",
    }  # fmt: skip
    pipe = genai.ContinuousBatchingPipeline(str(converted(task)), cache, "CPU", properties)

    def generate(prompts: Prompts, count: int) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.min_new_tokens, config.ignore_eos = count, count, True
        ids = [ov.Tensor(np.array([list(one)], dtype=np.int64)) for one in prompts]
        found = pipe.generate(ids, [config] * len(ids))
        return [list(one.m_generation_ids[0]) for one in found]

    return generate


if __name__ == "__main__":
    measure(make)
