"""Make `tiny/tokenizer.json`, `tokenizer_config.json` and `config.json` anew: python -m ...sim.assets.build_tokenizer

A byte-level BPE with the structure that today's chat models have (a splitting pattern, byte fallback by construction,
chat markers as added tokens), trained on text that `words.py` generates, so that nothing third-party is in it. The
result is deterministic for one version of `tokenizers`; the ids are part of recorded tests, so rebuild with care.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from litellm_prefix_router.sim.assets import TINY_MODEL
from litellm_prefix_router.sim.words import ADJECTIVES, GLUE, NOUNS, VERBS, prose

VOCABULARY = 6144
MAX_MODEL_LEN = 32768
END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Contractions, words with an optional leading mark, single digits, runs of punctuation, line ends, spaces.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODE = (
    "def {v}_{n}({a}: int, {n}s: list[str]) -> dict[str, int]:\n    for {n} in {n}s:\n        if not {n}:\n"
    "            return {{}}\n        {a} += len({n})\n    return {{'{n}': {a}}}\n",
    '{{"type": "function", "function": {{"name": "{v}_{n}", "description": "{V} the {a} {n}", "parameters": '
    '{{"type": "object", "properties": {{"{n}": {{"type": "string"}}, "{a}": {{"type": "integer"}}}}, '
    '"required": ["{n}"]}}}}}}\n',
    "# {V} a {n}\n\n- the {a} {n}\n- `{v}` it: {d}\n\n| {n} | {v} |\n|---|---|\n| {d} | {a} |\n",
    "SELECT {n}, {a} FROM {n}s WHERE {v}_id = {d};\n",
    "const {n} = await {v}({{ {a}: {d}, {n}: '{a}' }});\n",
    "https://example.com/{n}/{v}?{a}={d}\n",
)
CHAT = "You can call these functions: name arguments description parameters properties required enum\nHello"
FOREIGN = (
    "über Straße Größe naïve façade señor mañana élève déjà привет мир спасибо "
    "你好 世界 港口 天気 ありがとう 🙂 🚢 – … “ ”"
)


def corpus(seed: int = 7) -> Iterator[str]:
    """Training text: prose, code, JSON, tables, numbers and a little of other scripts."""
    rng = Random(seed)
    for word in (*NOUNS, *VERBS, *ADJECTIVES, *GLUE):
        for form in (word, word + "s", word + "ed", word + "ing", word + "ly", "un" + word, "re" + word):
            copies = 40 if form == word else 3
            yield f"{(' ' + form) * copies} {form.capitalize()} {form.capitalize()}\n{form.capitalize()}"
    for _ in range(3000):
        yield prose(rng, 40)
    for _ in range(4000):
        names = {"v": rng.choice(VERBS), "n": rng.choice(NOUNS), "a": rng.choice(ADJECTIVES), "d": rng.randint(0, 9999)}
        yield rng.choice(CODE).format(V=str(names["v"]).capitalize(), **names)
    for _ in range(30):
        yield FOREIGN
        yield "".join(f"{role}\n{CHAT}" for role in ("system", "user", "assistant", "developer", "tool")) * 10


def build() -> Tokenizer:
    """Train the tokenizer. Takes a few seconds."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, ignore_merges=False))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=VOCABULARY - len(CONTROL) - len(MARKERS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
            special_tokens=[],
        ),
    )
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def configs(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """File name -> content of the JSON files beside the tokenizer."""
    ids = {text: tokenizer.token_to_id(text) for text in (*CONTROL, *MARKERS)}
    return {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": False,
            "bos_token": None,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "unk_token": None,
            "clean_up_tokenization_spaces": False,
            "errors": "replace",
            "model_max_length": MAX_MODEL_LEN,
            "added_tokens_decoder": {
                str(token): {
                    "content": text,
                    "lstrip": False,
                    "normalized": False,
                    "rstrip": False,
                    "single_word": False,
                    "special": text in CONTROL,
                }
                for text, token in ids.items()
            },
        },
        "config.json": {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "hidden_size": 128,
            "intermediate_size": 256,
            "initializer_range": 0.02,
            "max_position_embeddings": MAX_MODEL_LEN,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "use_sliding_window": False,
            "sliding_window": None,
            "attention_dropout": 0.0,
            "vocab_size": VOCABULARY,
            "bos_token_id": None,
            "eos_token_id": ids[TURN_END],
            "pad_token_id": ids[END_OF_TEXT],
        },
        "generation_config.json": {"eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]], "pad_token_id": ids[END_OF_TEXT]},
    }


def main() -> None:
    """Write the files of `tiny/` other than the chat template."""
    tokenizer = build()
    size = tokenizer.get_vocab_size()
    if size != VOCABULARY:
        raise SystemExit(f"the corpus gave {size} tokens, wanted {VOCABULARY}")
    TINY_MODEL.mkdir(exist_ok=True)
    tokenizer.save(str(TINY_MODEL / "tokenizer.json"), pretty=False)
    for name, content in configs(tokenizer).items():
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        (TINY_MODEL / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
