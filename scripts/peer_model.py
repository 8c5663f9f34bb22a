"""Writes a GGUF model as a Hugging Face folder in bf16, for servers that read no GGUF: `peer_model.py GGUF FOLDER`.

Run by `scripts/peers.sh` in vLLM's environment (transformers, gguf, accelerate). The weights are the dequantized ones,
so every server of a comparison answers from the same numbers, up to its own arithmetic.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

source, target = Path(sys.argv[1]), Path(sys.argv[2])
loaded = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
config = LlamaConfig.from_dict({k: v for k, v in loaded.config.to_dict().items() if k != "quantization_config"})
model = LlamaForCausalLM(config)
missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
if unexpected or any("lm_head" not in name for name in missing):
    raise SystemExit(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
model.tie_weights()
model.to(torch.bfloat16).save_pretrained(target)
AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
print(f"wrote {target}")
