"""The tokenizer that an engine really builds from a model's files, which is not always what tokenizer.json says.

The engines load tokenizers through one library, which picks a class by the model's type and the name in
tokenizer_config.json. Generic classes take tokenizer.json as it is; a few rebuild normalizer and pre-tokenizer from
their own code and keep only vocabulary, merges and post-processor. The tables say which, as of that library's
release 5.19; where a model is in none, the name in the files decides, as it does there.
"""

from __future__ import annotations

import json
from typing import Any

from .encoded import PromptUnknown
from .tokenizer_files import TokenizerFiles

_GENERIC_NAMES = """
    aria bigbird_pegasus canary flex_olmo glm glm4 glm4_moe glm4_moe_lite glm4v glm4v_moe glm_image glmasr got_ocr2
    gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared kimi_k25 kimi_linear kosmos-2 mimo_v2_flash
    minicpmv4_6 minicpmv4_7 nystromformer olmo2 olmo3 olmo_hybrid pegasus_x persimmon pix2struct stablelm umt5
    xlm-roberta-xl arctic chameleon chatlm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl
    deepseek_vl_hybrid deepseek_vl_v2 deepseek_ocr deepseek_ocr2 ernie4_5 ernie4_5_moe fuyu h2ovl_chat hyperclovax
    hyperclovax_vlm internlm2 jamba janus llava llava_next minicpm3 minicpmv minimax_m2 modernbert modernbert-decoder
    molmo molmo2 nemotron nvfp4 opencua openvla paddleocr_vl phi3 phi3_v phimoe step3p5 step3_vl vipllava cohere_asr
    smolvlm ministral ministral3 mistral mistral3 mixtral pixtral voxtral"""
_GENERIC_MODELS = frozenset(_GENERIC_NAMES.split())
"""Models whose files are taken as they are, whatever class they name."""

_OWN_CLASS = {
    "Qwen2Tokenizer": """audioflamingo3 colqwen2 hunyuan_vl internvl ovis2 qwen2 qwen2_5_omni qwen2_5_vl qwen2_audio
    qwen2_moe qwen2_vl qwen3 qwen3_asr qwen3_moe qwen3_next qwen3_omni_moe qwen3_vl qwen3_vl_moe""",
    "GemmaTokenizer": """gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma
    zaya""",
    "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "LlamaTokenizer": "idefics idefics2",
}
_CLASS_OF_MODEL = {model: name for name, models in _OWN_CLASS.items() for model in models.split()}
_MISNAMED = frozenset({"qwen2"})
"""Models whose files are known to name a wrong class: the model's own class counts."""

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CLASS_TOKENS: dict[str, dict[str, str]] = {
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "GemmaTokenizer": {
        "unk_token": "<unk>",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    },
    "Qwen2Tokenizer": {"unk_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"},
    "GPT2Tokenizer": dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    "GPTNeoXTokenizer": {
        **dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
        "pad_token": "<|padding|>",
    },
    "CohereTokenizer": {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
}
"""Names of special tokens that a class has where the files give none."""


def tokenizer_class(files: TokenizerFiles) -> str:
    """The class that decides how the tokenizer is built; "" for the generic one, which takes the file as it is."""
    model = files.model_type
    named = str(files.tokenizer_config.get("tokenizer_class") or files.config.get("tokenizer_class") or "")
    named = named.removesuffix("Fast")
    own = _CLASS_OF_MODEL.get(model)
    auto_map = files.tokenizer_config.get("auto_map")
    if auto_map:
        chosen = named if own is None else own  # custom code is not run here; its name is all there is to go by
    elif model in _GENERIC_MODELS:
        chosen = ""
    elif own is not None and (not named or model in _MISNAMED):
        chosen = own
    else:
        chosen = named
    return chosen if chosen in _CLASS_TOKENS else ""


def special_tokens(files: TokenizerFiles) -> dict[str, str]:
    """Named special tokens as a chat template sees them, by name such as "bos_token"."""
    config = files.tokenizer_config
    tokens = dict(_CLASS_TOKENS.get(tokenizer_class(files), {}))
    if "added_tokens_decoder" not in config:
        config = {**config, **files.special_tokens_map}
    for name, value in config.items():
        if not name.endswith("_token"):
            continue
        text = _content(value)
        if text is not None:
            tokens[name] = text
        elif name in _NAMED_TOKENS:
            tokens.pop(name, None)
    extra = config.get("extra_special_tokens")
    if isinstance(extra, dict):
        tokens |= {str(name): text for name, value in extra.items() if (text := _content(value)) is not None}
    return tokens


def _content(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def effective_tokenizer(files: TokenizerFiles) -> Any:
    """The `tokenizers.Tokenizer` that the engine builds. Raises PromptUnknown("tokenizer_missing")."""
    from tokenizers import AddedToken, Tokenizer

    content = files.read_tokenizer()
    if content is None:
        raise PromptUnknown("tokenizer_missing", f"no tokenizer.json in {files.folder.name}")
    _rebuild(content, files)
    try:
        tokenizer = Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises bare Exception
        raise PromptUnknown("tokenizer_missing", f"tokenizer.json: {str(error)[:120]}") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_added_tokens_decoder()
    present = {token.content for token in known.values()}
    wanted: list[Any] = []
    decoder = files.tokenizer_config.get("added_tokens_decoder")
    for index, value in sorted((decoder or {}).items(), key=lambda item: int(item[0])):
        if isinstance(value, dict) and isinstance(value.get("content"), str):
            flags = {
                name: bool(value[name])
                for name in ("single_word", "lstrip", "rstrip", "normalized", "special")
                if name in value
            }
            token = AddedToken(value["content"], **flags)
            if repr(known.get(int(index))) != repr(token):
                wanted.append(token)
                present.add(token.content)
    if decoder is None:
        for text in files.added_tokens:
            if text not in present:
                wanted.append(AddedToken(text, normalized=True))
                present.add(text)
    extra = files.tokenizer_config.get("extra_special_tokens")
    if extra is None:
        extra = files.tokenizer_config.get("additional_special_tokens")
    more = [_content(value) for value in extra] if isinstance(extra, list) else []
    for named in [*special_tokens(files).values(), *more]:
        if named is not None and named not in present:
            wanted.append(AddedToken(named, special=True))
            present.add(named)
    if wanted:
        tokenizer.add_tokens(wanted)
    return tokenizer


def _rebuild(content: dict[str, Any], files: TokenizerFiles) -> None:
    """Change tokenizer.json's content to what the class of this model makes of it."""
    name = tokenizer_class(files)
    model = content.get("model")
    if not name or not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        return
    config = files.tokenizer_config
    prefix_space = config.get("add_prefix_space")
    model = {
        **model,
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    }
    if name == "LlamaTokenizer":
        scheme = "never" if prefix_space is False else ("always" if config.get("legacy", False) else "first")
        content["normalizer"] = None
        content["pre_tokenizer"] = {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": scheme,
            "split": False,
        }
        model |= {"fuse_unk": True, "byte_fallback": True}
    elif name == "GemmaTokenizer":
        content["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        content["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        }
        unk = special_tokens(files).get("unk_token", "<unk>")
        model |= {"fuse_unk": True, "byte_fallback": True, "unk_token": unk}
    elif name == "Qwen2Tokenizer":
        content["normalizer"] = {"type": "NFC"}
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": _QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
                _byte_level(bool(prefix_space), use_regex=False),
            ],
        }
        model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    elif name == "CohereTokenizer":
        content["normalizer"] = {"type": "NFC"}
        content["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(bool(prefix_space))],
        }
        model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    else:
        if name == "GPTNeoXTokenizer":
            content["normalizer"] = {"type": "NFC"}
            content["post_processor"] = None
        else:
            content["normalizer"] = None
        content["pre_tokenizer"] = _byte_level(bool(prefix_space))
        model |= {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    content["model"] = model


def _byte_level(prefix_space: bool, *, use_regex: bool = True) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": prefix_space, "trim_offsets": True, "use_regex": use_regex}
