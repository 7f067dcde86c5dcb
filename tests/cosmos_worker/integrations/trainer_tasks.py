"""A process that imports transformers and TRL once, and forks a child for each rank of each task that it is given.

    python trainer_tasks.py

reads tasks as JSON lines and answers with one line each: for every rank, the exit code and what it found out.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import runpy
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers

from cosmos_ctrl.checkpoints import durable
from cosmos_ctrl.checkpoints.claims import claim_execution
from cosmos_ctrl.checkpoints.stores.local import LocalStore
from cosmos_worker.integrations.huggingface import CheckpointCallback

try:
    import trl
except ModuleNotFoundError:  # the tests of its trainers are skipped
    trl = None

#: Both libraries import a name when it is first used: here, once, and not in every child.
USED = [
    (transformers, ("LlamaConfig", "LlamaForCausalLM", "PreTrainedTokenizerFast", "Trainer", "TrainingArguments")),
    (trl, ("GRPOConfig", "GRPOTrainer", "SFTConfig", "SFTTrainer")),
]
for library, names in USED:
    for name in names if library else ():
        getattr(library, name)

DEADLINE_S = 60
SEQUENCES = 20
WORDS = ["<pad>", "<eos>", *(f"w{number}" for number in range(30))]


def tiny_model(seed: int = 3) -> Any:
    """A Llama of two layers with dropout, so that its training depends on the random state."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def tiny_tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def common(task: dict[str, Any]) -> dict[str, Any]:
    """Arguments that all trainers are given."""
    return {
        "output_dir": task.get("directories", {}).get(os.environ.get("RANK", ""), task["directory"]),
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "seed": 11,
        "dataloader_pin_memory": False,
        **task.get("args", {}),
    }


def plain_trainer(task: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    draws = random.Random(5)
    rows = [[draws.randrange(2, len(WORDS)) for _ in range(8)] for _ in range(task.get("sequences", SEQUENCES))]
    dataset = Dataset.from_dict({"input_ids": rows, "labels": rows})
    settings = {"max_steps": 12, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2} | common(task)
    trainer = transformers.Trainer(
        tiny_model(),
        transformers.TrainingArguments(**settings),
        train_dataset=dataset.to_iterable_dataset() if task.get("streaming") else dataset,
        eval_dataset=dataset.select(range(4)),
    )
    if "reseed" in task:
        torch.manual_seed(task["reseed"])
    return trainer, lambda: None


def sft_trainer(task: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    draws = random.Random(5)
    texts = [" ".join(draws.choices(WORDS[2:], k=6)) for _ in range(SEQUENCES)]
    settings = {"max_steps": 6, "per_device_train_batch_size": 2, "bf16": False, "max_length": 16} | common(task)
    dataset = Dataset.from_dict({"text": texts})
    trainer = trl.SFTTrainer(
        tiny_model(), trl.SFTConfig(**settings), train_dataset=dataset, processing_class=tiny_tokenizer()
    )
    return trainer, lambda: None


def grpo_trainer(task: dict[str, Any]) -> tuple[Any, Callable[[], Any]]:
    trained: list[list[str]] = []

    def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        trained.append(prompts)
        return [float(len(set(completion.split()))) for completion in completions]

    settings = {
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "max_completion_length": 4,
        "bf16": False,
    } | common(task)
    trainer = trl.GRPOTrainer(
        tiny_model(),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings),
        train_dataset=Dataset.from_dict({"prompt": [f"w{number} w{number + 1}" for number in range(8)]}),
        processing_class=tiny_tokenizer(),
    )
    return trainer, lambda: trained


def supersede_at(step: int) -> type[Any]:
    """A callback that claims the run for another execution, at the end of `step`."""

    class Supersedes(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and state.is_world_process_zero:
                claim_execution(LocalStore(Path(args.output_dir)), execution_id="another", note={})

    return Supersedes


TRAINERS = {"plain": plain_trainer, "sft": sft_trainer, "grpo": grpo_trainer}


def die_at(where: str, nth: int) -> None:
    """SIGKILL for this process, when `where` (``module:name.name``) is called for the nth time, before it does anything."""
    module, _, names = where.partition(":")
    owner: Any = importlib.import_module(module)
    *path, last = names.split(".")
    for name in path:
        owner = getattr(owner, name)
    original, calls = getattr(owner, last), 0

    def dying(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == nth:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, last, dying)


def synced_names() -> list[str]:
    """Names of files as they are made durable from here on."""
    names: list[str] = []
    original = durable.fsync_file

    def noting(descriptor: int, path: Path | str) -> None:
        names.append(Path(path).name)
        original(descriptor, path)

    durable.fsync_file = noting
    return names


def slow_down(owner: Any, name: str) -> None:
    """So that ranks which do not wait for this one are ahead of it."""
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return original(*args, **kwargs)

    setattr(owner, name, slow)


def perform(task: dict[str, Any]) -> dict[str, Any]:
    """Train once; what came of it."""
    if "die" in task and os.environ.get("RANK", "0") == str(task.get("die_on", 0)):
        die_at(*task["die"])
    if "script" in task:
        os.chdir(task["directory"])
        runpy.run_path(task["script"])
        return {}
    trainer, told = TRAINERS[task.get("trainer", "plain")](task)
    found: dict[str, Any] = {"synced": synced_names()}
    if os.environ.get("RANK") == str(task.get("slow_on")):
        slow_down(transformers.Trainer, "_save_rng_state")
    if task.get("callback", True):
        options = task.get("options", {})
        checkpoints = CheckpointCallback(trainer, **options)
        trainer.add_callback(checkpoints)
        if "supersede" in task:
            trainer.add_callback(supersede_at(task["supersede"]))
        if task.get("unasked"):
            trainer.train()
        resumed = checkpoints.resume(task.get("resume", True))
        found["resumed"] = resumed
        if task.get("forget"):
            resumed = None
        trainer.train(resume_from_checkpoint=task.get("give", resumed))
        if task.get("twice"):
            trainer.train()
    else:
        trainer.train()
    weights = {
        name: np.ascontiguousarray(value.numpy()).tobytes() for name, value in trainer.model.state_dict().items()
    }
    moments = [value.numpy().tobytes() for slot in trainer.optimizer.state.values() for value in slot.values()]
    digest = hashlib.sha256(b"".join(weights[name] for name in sorted(weights)) + b"".join(moments))
    best = trainer.state.best_model_checkpoint
    return found | {
        "digest": digest.hexdigest(),
        "steps": trainer.state.global_step,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "told": told(),
        "best": best,
    }


def be_rank(task: dict[str, Any], rank: int, ranks: int, answer: Path) -> NoReturn:
    """In a child of its own."""
    signal.alarm(DEADLINE_S)
    if ranks > 1:
        local = task["places"][rank] if "places" in task else (rank, ranks)
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = (rank, ranks, *local, "127.0.0.1", task["port"])
        os.environ |= {name: str(value) for name, value in zip(names, values, strict=True)}
    said = answer.with_suffix(".log").open("w", buffering=1)
    os.dup2(said.fileno(), 1)
    os.dup2(said.fileno(), 2)
    logging.basicConfig(stream=said, level=logging.INFO, force=True)
    try:
        answer.write_text(json.dumps(perform(task)))
        code = 0
    except BaseException as error:
        traceback.print_exc(file=said)
        answer.write_text(json.dumps({"error": type(error).__name__, "message": str(error)}))
        code = 1
    said.flush()
    # Gloo may abort a process that ends by its interpreter while a peer is gone already.
    os._exit(code)


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    for number, line in enumerate(sys.stdin):
        task = json.loads(line)
        directory, ranks = Path(task["directory"]), task.get("ranks", 1)
        directory.mkdir(parents=True, exist_ok=True)
        answers = [directory.parent / f"{directory.name}-{number}-{rank}.json" for rank in range(ranks)]
        children = []
        for rank, answer in enumerate(answers):
            if (child := os.fork()) == 0:
                be_rank(task, rank, ranks, answer)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        outcomes = []
        for code, answer in zip(codes, answers, strict=True):
            found = json.loads(answer.read_text()) if answer.exists() else {}
            outcomes.append({"code": code, "log": answer.with_suffix(".log").read_text()} | found)
        print(json.dumps(outcomes), flush=True)


if __name__ == "__main__":
    main()
