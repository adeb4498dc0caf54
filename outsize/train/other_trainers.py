"""Words of other trainers, and what they are here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_EPOCHS = "train.epochs, or train.steps, train.tokens, train.minutes"
_BATCH = "train.batch_tokens, tokens of a step over all workers"
_ROWS = "plan.microbatch_rows, rows at a time; a step is train.batch_tokens whatever it is"
_STOP = "callbacks: [early-stopping], with callbacks.patience"
_SHAPE = "learning_rate.shape: constant, linear, cosine or wsd"
_WARMUP = "learning_rate.warmup, in steps"
_TENSOR = "mesh, as tensor=2"
_PIPELINE = "mesh, as pipeline=2, and plan.pipeline for the order"
_DATA = "mesh, as data=2, or workers"
_RESUME = "outsize train --resume DIR"
_LORA = "adapt: {lora: {rank: 16}}"

# By the word without -, _ and capitals.
OTHERS: Mapping[str, str] = MappingProxyType(
    {
        "epochs": _EPOCHS, "epoch": _EPOCHS, "numepochs": _EPOCHS, "numtrainepochs": _EPOCHS,
        "maxepochs": _EPOCHS, "maxsteps": "train.steps", "numsteps": "train.steps",
        "maxiters": "train.steps", "iterations": "train.steps",
        "batchsize": _BATCH, "globalbatchsize": _BATCH, "trainbatchsize": _BATCH,
        "gradientaccumulation": _ROWS, "gradientaccumulationsteps": _ROWS, "gradaccum": _ROWS,
        "accumulategradbatches": _ROWS, "microbatchsize": _ROWS, "perdevicetrainbatchsize": _ROWS,
        "earlystop": _STOP, "earlystopping": _STOP, "patience": _STOP,
        "lora": _LORA, "peft": _LORA, "lorar": _LORA, "lorarank": _LORA, "qlora": _LORA,
        "adapter": _LORA,
        "learningrate": "optimizer.lr", "optim": "optimizer.name", "adambeta1": "optimizer.betas",
        "lrscheduler": _SHAPE, "lrschedulertype": _SHAPE, "scheduler": _SHAPE,
        "warmupsteps": _WARMUP, "warmupratio": _WARMUP, "warmupiters": _WARMUP,
        "maxgradnorm": "train.clip", "gradclip": "train.clip", "gradientclipval": "train.clip",
        "clipgradnorm": "train.clip",
        "fp16": "precision: float16", "bf16": "precision: bfloat16",
        "dtype": "precision", "torchdtype": "precision", "mixedprecision": "precision",
        "gradientcheckpointing": "plan.recompute", "activationcheckpointing": "plan.recompute",
        "fsdp": "plan.zero: 3", "deepspeed": "plan.zero", "zerostage": "plan.zero",
        "cpuoffload": "host_memory, with memory", "offload": "host_memory or disk, with memory",
        "tensorparallel": _TENSOR, "tensorparallelsize": _TENSOR, "tp": _TENSOR,
        "pipelineparallel": _PIPELINE, "pipelineparallelsize": _PIPELINE, "pp": _PIPELINE,
        "dataparallel": _DATA, "dp": _DATA, "gpus": _DATA, "devices": _DATA, "nprocpernode": _DATA,
        "maxseqlength": "train.sequence", "seqlength": "train.sequence",
        "blocksize": "train.sequence", "contextlength": "train.sequence",
        "dataset": "data.path", "trainfile": "data.path", "datapath": "data.path",
        "valsplit": "data.validation", "evalsplit": "data.validation",
        "outputdir": "output", "logdir": "output", "savedir": "output",
        "savesteps": "train.save_every", "saveinterval": "train.save_every",
        "evalsteps": "train.evaluate_every", "evalinterval": "train.evaluate_every",
        "savetotallimit": "train.keep", "modelname": "model.name",
        "modelnameorpath": "model.name", "tokenizername": "data.tokenizer",
        "resumefromcheckpoint": _RESUME, "resume": _RESUME,
        "reportto": "callbacks: [wandb] or [mlflow]; TensorBoard files lie in output anyway",
        "wandb": "callbacks: [wandb]", "mlflow": "callbacks: [mlflow]",
        "loadbestmodelatend": "callbacks: [keep-best]", "savetime": "train.save_every, as 10min",
    }
)  # fmt: skip


def here(word: str) -> str | None:
    """What a word of another trainer is here, None where it is none."""
    return OTHERS.get(re.sub(r"[-_]", "", word.rpartition(".")[2]).lower())
