"""Loading gives transformers' own model, with weights that processes share."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared.models.error import ModelError
from shared.models.load import load_model
from tests.support.tiny_model import build_tiny_model

_CPU = torch.device("cpu")
_IDS = torch.arange(3, 40)[None]

_TOUCH_ALL = """
import sys
from pathlib import Path
import torch
from shared.models.load import load_model

torch.set_num_threads(1)
model = load_model(Path(sys.argv[1]), torch.float32, torch.device("cpu"))
sum(p.sum().item() for p in model.parameters())
print("touched", flush=True)
for _ in sys.stdin:
    sizes = {"Rss": 0, "Pss": 0}
    ours = False
    for line in open("/proc/self/smaps"):
        name = line.split(":")[0]
        if "-" in name.split(" ")[0]:
            ours = line.rstrip().endswith("model.safetensors")
        elif ours and name in sizes:
            sizes[name] += int(line.split()[1]) * 1024
    print(sizes["Rss"], sizes["Pss"], flush=True)
"""


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(_IDS).logits
    return logits


@pytest.mark.parametrize("tied", [True, False])
def test_it_computes_what_transformers_computes(tmp_path: Path, tied: bool) -> None:
    """Logits have the same bits as those of a model loaded by from_pretrained, with tied and untied outputs."""
    folder = build_tiny_model(tmp_path, tie_word_embeddings=tied)
    model = load_model(folder, torch.float32, _CPU)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(_logits(expected), _logits(model))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert tied == (model.lm_head.weight is model.model.embed_tokens.weight)


def test_a_checkpoint_in_several_files_is_read_whole(tmp_path: Path) -> None:
    """The files that the index names are all used."""
    folder = build_tiny_model(tmp_path)
    expected = _logits(load_model(folder, torch.float32, _CPU))
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(expected, _logits(load_model(folder, torch.float32, _CPU)))


def test_another_dtype_is_cast(tmp_path: Path) -> None:
    """Weights that are stored in float32 and wanted in bfloat16 are rounded as torch rounds them."""
    folder = build_tiny_model(tmp_path)
    model = load_model(folder, torch.bfloat16, _CPU)
    expected = load_file(folder / "model.safetensors")["model.norm.weight"].to(torch.bfloat16)
    assert torch.equal(expected, model.state_dict()["model.norm.weight"])
    assert {torch.bfloat16} == {parameter.dtype for parameter in model.parameters()}
    assert torch.float32 == next(buffer.dtype for _, buffer in model.named_buffers())


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen3"])
def test_relatives_of_the_architecture_load_too(tmp_path: Path, kind: str) -> None:
    """Architectures that transformers knows and that are built alike need no code of ours."""
    folder = build_tiny_model(tmp_path / "qwen2")
    settings = json.loads((folder / "config.json").read_text())
    for key in ("model_type", "architectures", "torch_dtype", "max_window_layers", "use_sliding_window"):
        del settings[key]
    build: Any = AutoModelForCausalLM.from_config
    made = build(AutoConfig.for_model(kind, **settings, head_dim=16))
    made.save_pretrained(tmp_path / kind)
    assert torch.equal(_logits(made.eval()), _logits(load_model(tmp_path / kind, torch.float32, _CPU)))


def test_missing_weights_are_an_error(tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused; nothing random takes its place."""
    folder = build_tiny_model(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"lacks 1 tensors .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder, torch.float32, _CPU)


def test_weights_of_other_shapes_are_an_error(tmp_path: Path) -> None:
    """A config that does not fit the weights is one clear line."""
    folder = build_tiny_model(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 32}))
    with pytest.raises(ModelError, match=r"cannot load .*size mismatch[^\n]*$"):
        load_model(folder, torch.float32, _CPU)


def test_two_processes_share_one_copy_of_the_weights(tmp_path: Path) -> None:
    """When both have touched all weights, each one's proportional share of the file is half of it."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 3}
    folder = build_tiny_model(tmp_path, **sizes)
    num_bytes = (folder / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", _TOUCH_ALL, str(folder)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert "touched\n" == process.stdout.readline()
        for process in processes:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            rss, pss = map(int, process.stdout.readline().split())
            assert num_bytes > 40e6
            assert rss == pytest.approx(num_bytes, rel=0.02)
            assert pss == pytest.approx(num_bytes / 2, rel=0.02)
    finally:
        for process in processes:
            process.communicate()
