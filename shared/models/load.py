"""From a checkpoint folder to a model ready for inference, with weights that stay in the mapped file on a CPU.

The module tree is built on the meta device and the file's tensors are put in as they are: nothing is copied, and
all processes that load the same folder share its pages in the page cache.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from shared.models.error import ModelError
from shared.models.files import weight_files

SERVING_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    """The causal language model in `folder`, in eval mode and without gradients.

    On a CPU the parameters are views of the mapped safetensors files where these are in `dtype`: writing to one
    is possible and private to this process. On any other device they are copies there.
    Raises ModelError: an architecture that transformers does not know, or weights that do not fit it.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        build = AutoModelForCausalLM.from_config
        with torch.device("meta"):
            model: PreTrainedModel = build(config, dtype=dtype)  # type: ignore[no-untyped-call]
        model.load_state_dict(_read_tensors(folder, dtype, device), strict=False, assign=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as exc:
        raise ModelError(f"cannot load {folder}: {' '.join(str(exc).split())}") from exc
    model.tie_weights()
    _make_computed_buffers(model, config, device)
    absent = [name for name, tensor in model.named_parameters() if tensor.is_meta]
    absent += [name for name, tensor in model.named_buffers() if tensor.is_meta]
    if absent:
        raise ModelError(f"{folder} lacks {len(absent)} tensors of its architecture, among them {absent[0]}")
    model.requires_grad_(False)
    model.eval()  # type: ignore[no-untyped-call]
    return model


def _read_tensors(folder: Path, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt", device=str(device)) as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dict
                tensor = stored.get_tensor(name)
                tensors[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    return tensors


def _make_computed_buffers(model: nn.Module, config: object, device: torch.device) -> None:
    """Compute the buffers that no checkpoint holds (rotary frequencies), which are still on the meta device.

    Their modules are built from the config alone, so a second instance off the meta device has the values.
    """
    for module in model.modules():
        names = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        if names:
            made = type(module)(config=config).to(device)
            for name in names:
                module.register_buffer(name, getattr(made, name), persistent=False)
