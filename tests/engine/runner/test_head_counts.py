"""Query logs of any count of heads: shapes as they are published, under every policy, in every form
of entries, layout and type of the log. A block that queries do not fill wastes its last bytes."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.harness.setup.checkpoint import random_statistics
from kvserve import LLM, SamplingParams
from kvserve.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig
from kvserve.engine.compression.query_statistics import FILE
from kvserve.engine.models.implementation import choose_spec
from kvserve.engine.policies.registry import make_policy, policy_names
from kvserve.engine.runner.plan import EnginePlan, make_plan
from kvserve.entry_format import entry_format
from kvserve.log import ConfigError
from kvserve.scheduler.layout import Granularity
from tests.checkpoints import random_prompts


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    windows: bool = False


SHAPES = [
    *(Shape(9, 3, 64), Shape(14, 2, 64), Shape(12, 2, 128), Shape(28, 4, 128), Shape(40, 8, 128)),
    *(Shape(24, 8, 128), Shape(32, 8, 128), Shape(64, 8, 128), Shape(4, 1, 256), Shape(8, 4, 256)),
    *(Shape(16, 16, 128), Shape(71, 1, 64), Shape(64, 8, 64, windows=True)),
]
IDS = ["-".join(map(str, shape[:3])) for shape in SHAPES]
LAYOUTS = [each.value for each in Granularity]
LOGGED = ("auto", "model", "fp8", "int4")
PROMPT, ANSWER = 120, 36
POLICIES: dict[str, dict[str, Any]] = {
    **{"none": {}, "h2o": {"budget": 20}, "streaming_llm": {"budget": 24}},
    "kara": {"window": 24, "buffer": 8, "period": 4},
    **{"snapkv": {"budget": 20, "window": 4}, "rkv": {"budget": 24, "window": 4}},
    **{"keydiff": {"budget": 20}, "triattention": {"budget": 20, "protect_prompt": False}},
    "chunkkv": {"budget": 24, "window": 4, "chunk_size": 4},
    **{"pyramidkv": {"budget": 20, "window": 4}, "pyramidinfer": {"min_context": 8}},
    "dynamickv": {"budget": 20, "window": 4},
    "windowkv": {"budget": 24, "window": 4, "chunk_size": 4, "reuse_layers": 1},
    "adakv": {"budget": 20, "window": 4},
    "spindlekv": {"window": 96, "flush_every": 96},
}
BY_TYPE = {
    "adakv": lambda dtype: {"scorer": {"name": "snapkv", "query_dtype": dtype}},
    **dict.fromkeys(("kara", "snapkv", "pyramidkv", "rkv"), lambda dtype: {"query_dtype": dtype}),
}
"""How policies are asked for a type of the log; the others do not offer it."""
SPECS: list[dict[str, Any]] = [
    *({"name": name, **args} for name, args in POLICIES.items() if name not in BY_TYPE),
    {"name": "spindlekv", "codebook": False, "window": 4},
    *(
        {"name": name, **POLICIES[name], **asked(dtype)}
        for name, asked in BY_TYPE.items()
        for dtype in LOGGED
    ),
]
CELLS = list(product(SPECS, KV_CACHE_DTYPES, LAYOUTS))


def refused_by(shape: Shape, spec: dict[str, Any], form: str, layout: str) -> tuple[str, ...]:
    """What the refusal of a cell may begin with: empty if it has to run, whatever its heads."""
    name, coded = spec["name"], spec["name"] == "spindlekv" and spec.get("codebook", True)
    if shape.windows and (coded or name == "pyramidinfer"):
        return ("--policy: ", "--policy.flush_every: ")
    if name == "pyramidinfer" and entry_format(form, 4).few:
        return ("--policy: ", f"--kv-layout {layout}: ")
    policy = make_policy(spec).for_model(1 + (not shape.windows), 16)
    found: tuple[str, ...] = ()
    if not policy.granularity.fits(Granularity(layout)):
        found += (f"--kv-layout {layout}: ",)
    if coded and form != "auto":  # blocks that grow are no multiple of what is coded together
        found += (f"--kv-cache-dtype {form}: ", "--policy.flush_every: ")
    return found


@pytest.fixture(scope="module", params=SHAPES, ids=IDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The config of a model of two narrow layers, and where its queries point."""
    shape: Shape = request.param
    directory = tmp_path_factory.mktemp("model")
    config: dict[str, Any] = {
        **{"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 32},
        **{"num_hidden_layers": 2, "vocab_size": 128, "max_position_embeddings": 512},
        **{"num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads},
        **{"head_dim": shape.dim, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"},
    }
    if shape.windows:
        config |= {"architectures": ["GptOssForCausalLM"], "sliding_window": 20}
        config |= {"layer_types": ["sliding_attention", "full_attention"]}
        config |= {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True}
    (directory / "config.json").write_text(json.dumps(config))
    spec = choose_spec(directory, ModelConfig())
    random_statistics(spec, seed=1).save(directory / FILE)
    return directory


def shape_of(directory: Path) -> Shape:
    return SHAPES[IDS.index(_id(json.loads((directory / "config.json").read_text())))]


def _id(config: dict[str, Any]) -> str:
    names = "num_attention_heads", "num_key_value_heads", "head_dim"
    return "-".join(str(config[name]) for name in names)


def settings(directory: Path, spec: dict[str, Any], form: str, layout: str) -> dict[str, Any]:
    args = {name: value for name, value in spec.items() if name != "name"}
    return {
        **{"model": str(directory), "load_format": "dummy", "skip_tokenizer_init": True},
        **{"policy": spec["name"], "policy_args": args, "max_num_seqs": 2},
        **{"kv_cache_dtype": form, "kv_layout": layout},
    }


def check_refusal(error: ConfigError, prefixes: tuple[str, ...]) -> None:
    """One sentence that names what to set instead."""
    assert str(error).startswith(prefixes or "nothing"), error
    assert any(word in str(error) for word in ("choose", "use ", "multiple"))
    assert "\n" not in str(error)


def test_every_policy_has_a_row() -> None:
    assert set(POLICIES) == {spec["name"] for spec in SPECS} >= set(policy_names())


def test_no_policy_is_refused_for_a_count_of_heads(model: Path) -> None:
    shape = shape_of(model)
    for spec, form, layout in CELLS:
        prefixes = refused_by(shape, spec, form, layout)
        try:
            plan = make_plan(EngineConfig.from_flat(**settings(model, spec, form, layout)))
        except ConfigError as error:
            check_refusal(error, prefixes)
        else:
            assert not prefixes
            assert plan.policy.query_reduction in (None, plan.log.reduction)
            check_bytes(plan, shape)


def check_bytes(plan: EnginePlan, shape: Shape) -> None:
    """As many tokens are logged in a block as fit there."""
    heads = shape.heads if plan.log.reduction == "heads" else shape.kv_heads
    vector = {"model": 4 * shape.dim, "fp8": shape.dim, "int4": shape.dim // 2 + 4}[plan.log.dtype]
    held = plan.block_bytes * plan.layout.rows // plan.layout.layers_per_block
    assert plan.log_block_tokens == held // (heads * vector) >= 1
    few = plan.form.few  # whose blocks may be larger for other reasons
    assert (
        few
        or plan.layout.block_size == 16
        or plan.log_block_tokens < 16 / plan.layout.block_size + 2
    )


def run(
    directory: Path, cells: list[tuple[dict[str, Any], str, str]], backend: str
) -> Counter[str]:
    """Engines of these cells from start to answer; returns how many ran and were refused."""
    shape, counts = shape_of(directory), Counter[str]()
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    prompt = random_prompts([PROMPT])
    for spec, form, layout in cells:
        given = settings(directory, spec, form, layout)
        given["attention_backend"] = backend
        given["policy"] = {"name": given["policy"], **given.pop("policy_args")}
        prefixes = refused_by(shape, spec, form, layout)
        try:
            llm = LLM(**given, kv_cache_memory=2**26, max_model_len=256)
        except ConfigError as error:
            check_refusal(error, prefixes)
            counts["refused"] += 1
            continue
        (output,) = llm.generate(prompt, params, use_tqdm=False)
        llm.close()
        assert not prefixes and len(output.outputs[0].token_ids) == ANSWER
        details = output.kv_cache_details
        assert bool(details.compactions) is (spec["name"] != "none"), (spec, form, layout)
        counts["ran"] += 1
    return counts


def test_a_few_of_them_serve(model: Path) -> None:
    """One cell of each shape, from one end of the policies to the other."""
    at = SHAPES.index(shape_of(model))
    cells = [cell for cell in CELLS if not refused_by(SHAPES[at], *cell)]
    one = cells[at * len(cells) // len(SHAPES)]
    assert run(model, [one], "torch")["ran"] == 1


@pytest.mark.slow
def test_all_of_them_serve(model: Path) -> None:
    counts = run(model, CELLS, "auto")
    assert counts.total() == len(CELLS)
    print(dict(counts))
