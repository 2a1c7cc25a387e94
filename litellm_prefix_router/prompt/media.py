"""Images, audio, video and embeddings in a prompt: unknown as tokens, known apart by a digest.

How many placeholder tokens a medium takes depends on the model's processor, so token ids are exact only up to the
first one. What follows is told apart by the medium's own `uuid` (the engine's identifier too) or by its content.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import xxhash

from .request_forms import MediaPart

MEDIA_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "audio_url": "audio",
    "input_audio": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
    "prompt_embeds": "prompt_embeds",
    "file": "file",
}
_SOURCES = (
    *("image_url", "input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "video_embeds"),
    *("data", "file", "image_pil"),
)


def media_part(part: Mapping[str, Any]) -> MediaPart:
    """The medium of one content part."""
    kind = MEDIA_KINDS[part["type"]]
    uuid = part.get("uuid")
    if uuid is not None:
        return MediaPart(kind, digest("uuid", str(uuid)))
    for name in _SOURCES:
        if part.get(name) is not None:
            return MediaPart(kind, digest(kind, part[name]))
    return MediaPart(kind, digest(kind, ""))


def digest(kind: str, value: Any) -> bytes:
    """16 bytes over a medium's content or name; nested values by their text."""
    state = xxhash.xxh3_128(kind.encode() + b"\0")
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Mapping):
            for key in sorted(item, key=str, reverse=True):
                if key != "detail":
                    stack += [item[key], str(key)]
        elif isinstance(item, list):
            stack += reversed(item)
        else:
            state.update(str(item).encode("utf-8", "surrogatepass") + b"\0")
    return bytes(state.digest())
