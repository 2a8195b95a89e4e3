"""Make the model that `ladder demo` ships: stories260K (llama2.c format) as a Hugging Face checkpoint.

    python -m lab.tools.make_demo_model stories260K.bin tok512.bin stories.jsonl.xz src/ladder_residual/assets/demo

The checkpoint and tokenizer are those of karpathy's llama2.c (MIT); the text is sampled from its larger sister stories15M.
"""

import json
import lzma
import struct
import sys
from pathlib import Path

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CONTEXT = 512
STORIES = 40


def weights(path: Path) -> tuple[LlamaConfig, dict[str, torch.Tensor]]:
    raw = path.read_bytes()
    dim, hidden, layers, heads, kv_heads, vocab, context = struct.unpack("7i", raw[:28])
    head = dim // heads
    flat = torch.from_numpy(np.frombuffer(raw, np.float32, offset=28).copy())
    offset = 0

    def take(*shape: int) -> torch.Tensor:
        nonlocal offset
        count = int(np.prod(shape))
        offset += count
        return flat[offset - count : offset].view(*shape)

    def unpair(rows: torch.Tensor, count: int) -> torch.Tensor:
        """llama2.c rotates neighbouring pairs, Hugging Face the two halves of a head: reorder the rows of a head."""
        return rows.view(count, head // 2, 2, dim).transpose(1, 2).reshape(count * head, dim)

    embedding = take(vocab, dim)
    parts = {
        "input_layernorm": take(layers, dim),
        "self_attn.q_proj": take(layers, dim, dim),
        "self_attn.k_proj": take(layers, kv_heads * head, dim),
        "self_attn.v_proj": take(layers, kv_heads * head, dim),
        "self_attn.o_proj": take(layers, dim, dim),
        "post_attention_layernorm": take(layers, dim),
        "mlp.gate_proj": take(layers, hidden, dim),
        "mlp.down_proj": take(layers, dim, hidden),
        "mlp.up_proj": take(layers, hidden, dim),
    }
    state = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(dim)}
    for name, stacked in parts.items():
        for layer in range(layers):
            matrix = stacked[layer]
            if name.endswith("q_proj"):
                matrix = unpair(matrix, heads)
            elif name.endswith("k_proj"):
                matrix = unpair(matrix, kv_heads)
            state[f"model.layers.{layer}.{name}.weight"] = matrix.clone()
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=[1, 2],  # a story ends where the next would begin
        pad_token_id=0,
        dtype="float32",
    )
    return config, state


def tokenizer(path: Path) -> PreTrainedTokenizerFast:
    raw = path.read_bytes()
    offset, pieces = 4, []
    while offset < len(raw):
        score, length = struct.unpack_from("fi", raw, offset)
        offset += 8 + length
        pieces.append((raw[offset - length : offset].decode("utf-8"), score))
    names = [text.replace(" ", "▁") for text, _ in pieces]
    names[:3] = ["<unk>", "<s>", "</s>"]
    vocab = {name: index for index, name in enumerate(names)}
    # The pieces were learnt best first, so a merge ranks as high as the score of what it makes.
    merges = [
        (-score, name[:cut], name[cut:])
        for name, (_, score) in zip(names, pieces, strict=True)
        for cut in range(1, len(name))
        if name[:cut] in vocab and name[cut:] in vocab and not name.startswith("<")
    ]
    model = models.BPE(
        vocab=vocab, merges=[(a, b) for _, a, b in sorted(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    made = Tokenizer(model)
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names[:3]])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<unk>", model_max_length=CONTEXT
    )


def main(model_path: str, tokenizer_path: str, stories_path: str, out: str) -> None:
    config, state = weights(Path(model_path))
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    model.generation_config.eos_token_id = [1, 2]
    model.save_pretrained(out)
    tokenizer(Path(tokenizer_path)).save_pretrained(out)
    with lzma.open(stories_path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    text = [row["text"].strip() for row in rows if row.get("complete", True)]
    (Path(out) / "stories.txt").write_text("\n\n".join(text[:STORIES]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
