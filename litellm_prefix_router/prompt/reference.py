"""What must be known of a model's tokenizer beside its ids, told by the reference library.

That library builds a tokenizer in calls during which no other thread of the process runs (measured: 0.5 s for 11 MB of
tokenizer.json on an idle machine, 1.4 s for 33 MB, with as much again for reading and writing the JSON). So a large one
is built in a child process. It leaves the tokenizer's effective file, which the fast library reads without holding up
the others for long, and the facts; the reference tokenizer itself is built here only where the fast one will not do.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .backend import TokenizersBackend, sample_texts
from .effective import effective_tokenizer
from .tokenizer_files import TokenizerFiles

log = logging.getLogger(__name__)

_BUILT_HERE_BYTES = 1 << 20
"""Size of a tokenizer.json up to which it is built at once: 50 ms or so."""
_TIMEOUT_S = 300.0
_FACTS, _FILE = "facts.json", "tokenizer.json"


class AddedToken(NamedTuple):
    """A text that becomes one token wherever it stands, and how it looks at its surroundings."""

    content: str
    normalized: bool
    lstrip: bool
    rstrip: bool
    single_word: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """The tokenizer that the engine builds from a model's files."""

    vocab_size: int
    added: Mapping[int, AddedToken]
    prefix: Sequence[int]
    """Ids that the post-processor puts before a text, and after it."""
    suffix: Sequence[int]
    expected: Sequence[Sequence[int]]
    """Ids of the sample texts, in their order."""
    file: Path | None = None
    """The effective tokenizer.json, where a child process left it."""
    text: str = ""
    """The same without a file."""

    def tokenizer(self) -> Any:
        """The `tokenizers.Tokenizer`, built now."""
        from tokenizers import Tokenizer

        return Tokenizer.from_str(self.text) if self.file is None else Tokenizer.from_file(str(self.file))


@contextmanager
def reference(files: TokenizerFiles) -> Iterator[Reference]:
    """The reference tokenizer of a model, its file there until the end. Raises PromptUnknown("tokenizer_missing")."""
    with ExitStack() as stack:
        if files.tokenizer_bytes > _BUILT_HERE_BYTES:
            folder = _temporary_folder(stack)
            if folder is not None and _built_by_a_child(files.folder, folder):
                yield _reference(json.loads((folder / _FACTS).read_text(encoding="utf-8")), file=folder / _FILE)
                return
        text, facts = build(files)
        yield _reference(facts, text=text)


def _temporary_folder(stack: ExitStack) -> Path | None:
    try:
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prefix-router-")))
    except OSError as error:  # a read-only file system, a full disk
        log.info("no temporary folder for a tokenizer: %s", error)
        return None


def build(files: TokenizerFiles) -> tuple[str, dict[str, Any]]:
    """The effective tokenizer.json, and the facts as JSON takes them. Raises PromptUnknown("tokenizer_missing")."""
    tokenizer = effective_tokenizer(files)
    added = {
        str(index): [getattr(token, name) for name in AddedToken._fields]
        for index, token in tokenizer.get_added_tokens_decoder().items()
    }
    prefix, suffix = _surroundings(tokenizer)
    ids = TokenizersBackend(tokenizer).encode_many(sample_texts([token[0] for token in added.values()]))
    facts = {
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "added": added,
        "prefix": prefix,
        "suffix": suffix,
        "expected": [np.frombuffer(packed, dtype="<u4").tolist() for packed in ids],
    }
    return tokenizer.to_str(), facts


def _reference(facts: Mapping[str, Any], **where: Any) -> Reference:
    added = {int(index): AddedToken(*token) for index, token in facts["added"].items()}
    return Reference(**{**facts, "added": added, **where})


def _built_by_a_child(model: Path, folder: Path) -> bool:
    """Whether a child process could build it. Where none can be started, or it fails, this one does without."""
    if not sys.executable or getattr(sys, "frozen", False):  # no interpreter that could be started again
        return False
    # -P: nothing is imported from the working directory
    command = [sys.executable, "-P", "-m", __name__, str(model), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("%s: tokenizer is built in this process: %s", model.name, type(error).__name__)
        return False
    if done.returncode:
        log.info("%s: tokenizer is built in this process: the other ended with %d", model.name, done.returncode)
    return done.returncode == 0


def _surroundings(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []


if __name__ == "__main__":
    from .tokenizer_files import read_files

    whole, told = build(read_files(Path(sys.argv[1])))
    Path(sys.argv[2], _FILE).write_text(whole, encoding="utf-8")
    Path(sys.argv[2], _FACTS).write_text(json.dumps(told), encoding="utf-8")
