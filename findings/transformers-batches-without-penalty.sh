#!/bin/sh
# transformers 5.23.0, on a CPU: repetition_penalty in generate_batch, its continuous batching
# Guess: greedy tokens are those of generate, under the same GenerationConfig, or it is refused
# Seen: without a penalty they are; with repetition_penalty=1.5 they are still those without, since generate_batch drops processors that it does not support (drop_unsupported_processors is True) and warns in its log
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -q torch==2.13.0 transformers==5.23.0 accelerate==1.15.0 numpy==2.3.5
cd "$work"
"$work/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=2, initializer_range=0.3, **sizes)).eval()
prompt = [5, 6, 7, 8, 9]
batching = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32, max_requests_per_batch=2)


def tokens(penalty, batched):
    config = GenerationConfig(max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=0, repetition_penalty=penalty)
    if batched:
        outputs = model.generate_batch(inputs=[prompt], generation_config=config, continuous_batching_config=batching, progress_bar=False)
        return next(iter(outputs.values())).generated_tokens
    ids = torch.tensor([prompt])
    return model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)[0, 5:].tolist()


plain, penalised, batched, dropped = (tokens(*case) for case in ((1.0, False), (1.5, False), (1.0, True), (1.5, True)))
print(transformers.__version__, "generate:", plain, "penalised:", penalised, "| generate_batch:", batched, "penalised:", dropped)
raise SystemExit(len(plain) != 12 or plain == penalised or batched != plain or dropped != plain)
PYTHON
